"""Launching the training processes of one node: a lone one directly, several through DeepSpeed's launcher.

The launcher of a node (deepspeed/launcher/launch.py, 0.19.8) sets RANK, LOCAL_RANK and WORLD_SIZE for each process,
forwards signals, and ends all processes when one dies. It is called directly: the `deepspeed` command in front of it
looks for other nodes and costs a second and a half. A lone process needs none of that, and does not wait for DeepSpeed
to be imported.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import psutil

from zerokara.config.training_settings import MachineSettings
from zerokara.errors import RunError
from zerokara.model import loopback
from zerokara.parent_death_signal import end_with_parent
from zerokara.progress import plural
from zerokara.resources import available_cores, num_oom_kills
from zerokara.training.planning import cores, limits, processors
from zerokara.training.processes import rendezvous

_LAUNCHER = "deepspeed.launcher.launch"
OUT_OF_MEMORY = 12
"""Exit code of a training process that ran out of memory and reported it (ENOMEM)."""
INTERRUPTED = 130
"""Exit code of a run that was asked to stop (128 + SIGINT, as shells have it)."""


def is_training_process() -> bool:
    """Whether this process was started by the launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _cuda() -> Any:
    """torch.cuda. Importing torch takes about a second, and happens only after the configuration was checked."""
    import torch

    return torch.cuda


def num_processes(config: MachineSettings) -> int:
    """Processes to start: the configured number, or one for each GPU that torch sees, or one on a CPU.

    Raises:
        UserError: more are configured than there are GPUs or cores; or torch does not see a GPU that is named.
    """
    num_gpus = _cuda().device_count()
    processors.check_devices_seen(config, num_gpus)
    return max(1, num_gpus) if config.num_processes == "auto" else config.num_processes


def precision(config: MachineSettings) -> Literal["bf16", "fp32"]:
    """The configured precision; for ``auto`` bf16 where the device computes in it, fp32 where it would emulate it."""
    if config.precision != "auto":
        return config.precision
    if _cuda().is_available():
        return "bf16" if _cuda().is_bf16_supported(including_emulation=False) else "fp32"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return "bf16" if "amx_bf16" in flags or "avx512_bf16" in flags else "fp32"


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU; None if torch sees none."""
    properties = [_cuda().get_device_properties(index) for index in range(_cuda().device_count())]
    return min((each.total_memory for each in properties), default=None)


def device_rows(num_processes: int) -> list[tuple[str, str]]:
    """The devices of the training processes, as rows of the plan; with a note if they may not be the ones intended."""
    num_gpus = _cuda().device_count()
    if num_gpus:
        names = Counter(_cuda().get_device_name(index) for index in range(num_processes))
        device = "GPU, " + ", ".join(f"{number} × {name}" for name, number in names.items())
        device += f" ({num_gpus - num_processes} more not used)" if num_gpus > num_processes else ""
    else:
        num_cores, num_threads = plural(available_cores(), "core"), plural(cores.threads(num_processes), "thread")
        device = f"CPU, {num_cores}, {num_threads} a process"
    note = processors.unused(num_gpus)
    return [("device", device), *([("note", note)] if note else [])]


def launch(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run ``python -m module arguments`` in `processes` processes on this node; return the exit code.

    Ctrl-C, SIGTERM and SIGHUP ask the training processes to stop at the end of a step, and give the exit code 130 (or 1
    if they could not save); a second Ctrl-C kills them. If this process is killed, the launcher stops them, with time
    to save, or a lone process saves. A process that was killed is reported with the likely reason.
    """
    environment = {**os.environ, **loopback.environment(), limits.STARTED_NAME: str(psutil.Process().create_time())}
    environment["PYTHONSAFEPATH"] = "1"  # a file of the current folder is not imported as a package of the same name
    devices: list[int | str] = list(range(processes))
    if _cuda().is_available():
        named = processors.named_gpus()
        devices = list(named[:processes]) if named else devices
    else:
        environment["DS_ACCELERATOR"] = "cpu"
        environment.update(cores.environment(processes))
    if processes == 1:
        command = [sys.executable, "-u", "-m", module, *arguments]
        environment |= {**lone_environment(), processors.VARIABLE: str(devices[0]) if _cuda().is_available() else ""}
    else:
        # The launcher sets CUDA_VISIBLE_DEVICES itself, from the ids that it is given.
        nodes = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
        command = [sys.executable, "-m", _LAUNCHER, f"--world_info={nodes}", "--master_addr=127.0.0.1"]
        command += ["--no_local_rank", "--quiet", "--module", module, *arguments]
    oom_kills_before = num_oom_kills()
    with rendezvous.held() as variables:
        # A session of its own: a Ctrl-C in the terminal would reach the launcher too, which gives its processes 30
        # seconds (launch.py, terminate_process_tree), and saving a large model may take longer. A training process
        # would get it twice.
        end_with_us = partial(end_with_parent, os.getpid(), signal.SIGTERM)
        child = subprocess.Popen(command, env=environment | variables, start_new_session=True, preexec_fn=end_with_us)
        with SignalForwarding(child.pid, is_lone=processes == 1) as forwarding:
            code = child.wait()
    if forwarding.requested and code != RunError.exit_code:  # a run that was asked to stop, and could not save, failed
        return INTERRUPTED
    if is_kill(code):
        print(f"failed: {kill_message(oom_kills_before)}", file=sys.stderr)
    return code


def is_kill(code: int) -> bool:
    """Whether an exit code of the launcher means that a training process or the launcher was killed by SIGKILL."""
    # The launcher passes the negative number on, of which the shell's eight bits remain; shells use 128 + 9.
    return code in (-signal.SIGKILL, 256 - signal.SIGKILL, 128 + signal.SIGKILL)


def kill_message(oom_kills_before: int | None) -> str:
    """Explain a SIGKILL; `oom_kills_before` is `num_oom_kills` at the start of the run."""
    oom_kills = num_oom_kills()
    if oom_kills is None or oom_kills_before is None:
        evidence = "most likely by the kernel, out of memory (its counter cannot be read here; see dmesg)"
    elif oom_kills > oom_kills_before:
        evidence = f"by the kernel, out of memory: it has killed {oom_kills - oom_kills_before} here since the start"
    else:
        evidence = "from outside: the kernel has killed no process here for lack of memory since the start"
    return f"a training process was killed (SIGKILL), {evidence}"


class SignalForwarding:
    """Forwards requests to stop from this process to the training processes; a context manager."""

    def __init__(self, pid: int, is_lone: bool = False):
        """`pid` is the launcher's, or where the training process `is_lone` its own."""
        self._pid, self._is_lone = pid, is_lone
        self._previous: dict[signal.Signals, Any] = {}
        self.requested = False
        """Whether somebody asked to stop."""

    def __enter__(self) -> SignalForwarding:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._previous[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._pid)
            trainers = [started] if self._is_lone else started.children()
            ready = [process for process in trainers if _handles_sigterm(process.pid)]
            if not self.requested:
                when = "at the end of this step, and saving" if ready else "before the first step"
                print(f"stopping {when}; Ctrl-C again kills the run at once", flush=True)
            elif number == signal.SIGINT:
                for process in [*started.children(recursive=True), started]:
                    process.kill()
            if not trainers:
                started.terminate()  # it has started none yet
            for process in trainers:
                # They log which signal they got; one that still imports torch is ended by SIGTERM, without a traceback.
                is_ctrl_c = number == signal.SIGINT and process in ready
                process.send_signal(signal.SIGINT if is_ctrl_c else signal.SIGTERM)
        self.requested = True


def _handles_sigterm(pid: int) -> bool:
    """Whether a training process already handles SIGTERM, by `stopping.StopRequest.listen`."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("SigCgt:"):  # proc(5): a mask in hexadecimal, bit 0 for signal 1
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def lone_environment() -> dict[str, str]:
    """Environment of the only process of a run, as torchrun has it."""
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
