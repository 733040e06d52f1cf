"""Start the training processes of one node through the DeepSpeed launcher.

The launcher of a node (deepspeed/launcher/launch.py, 0.19.8) sets RANK, LOCAL_RANK and WORLD_SIZE for each process,
passes signals on, and ends all when one dies. It is called directly: the `deepspeed` command in front
of it looks for other nodes and costs a second and a half.
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

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import RunError
from zerokara.model import loopback
from zerokara.parent_death_signal import end_with_parent
from zerokara.resources import available_cores, num_oom_kills
from zerokara.training.planning import cores, limits, processors
from zerokara.training.processes import meeting

_LAUNCHER = "deepspeed.launcher.launch"


def is_training_process() -> bool:
    """Whether this process was started by the launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def num_processes(config: PretrainConfig) -> int:
    """Processes to start: as asked, or one for each GPU that torch sees, or one on a CPU.

    Raises:
        UserError: more are asked for than there are GPUs, or cores; or torch does not see a GPU that is named.
    """
    import torch  # about a second, so only after everything else was found right

    gpus = torch.cuda.device_count()
    processors.check_seen(config, gpus)
    return max(1, gpus) if config.num_processes == "auto" else config.num_processes


def precision(config: PretrainConfig) -> Literal["bf16", "fp32"]:
    """The number format: as asked, or bf16 where the device computes in it and fp32 where it would only imitate it."""
    if config.precision != "auto":
        return config.precision
    import torch

    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return "bf16" if "amx_bf16" in flags or "avx512_bf16" in flags else "fp32"


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU, or None where torch sees none."""
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return min((one.total_memory for one in properties), default=None)


def device_rows(num_processes: int) -> list[tuple[str, str]]:
    """What so many training processes compute on, for people; and a word where that may not be what was meant."""
    import torch

    seen = torch.cuda.device_count()
    if seen:
        names = Counter(torch.cuda.get_device_name(index) for index in range(num_processes))
        words = "GPU, " + ", ".join(f"{number} × {name}" for name, number in names.items())
        words += f" ({seen - num_processes} more not used)" if seen > num_processes else ""
    else:
        there, each = available_cores(), cores.threads(num_processes)
        words = f"CPU, {there} core{'s' if there > 1 else ''}, {each} thread{'s' if each > 1 else ''} a process"
    word = processors.unused(seen)
    return [("device", words), *([("note", word)] if word else [])]


def launch(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run ``python -m module arguments`` in `processes` processes on this node; gives the exit code.

    Ctrl-C, SIGTERM and SIGHUP ask the training processes to stop at the edge of a step, and give the exit code 130 (or
    1 where they could not save); a second Ctrl-C ends them at once. Should this process be killed, the launcher ends
    them, with time to save. A process that was killed is told with the likely reason.
    """
    import torch

    environment = {**os.environ, **loopback.environment(), limits.STARTED_NAME: str(psutil.Process().create_time())}
    environment["PYTHONSAFEPATH"] = "1"  # a file of the current folder never passes for a package of the same name
    devices: list[int | str] = list(range(processes))
    if torch.cuda.is_available():
        # The launcher sets CUDA_VISIBLE_DEVICES itself, from the ids that it is given.
        named = processors.named_gpus()
        devices = list(named[:processes]) if named else devices
    else:
        environment["DS_ACCELERATOR"] = "cpu"
        environment.update(cores.environment(processes))
    nodes = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
    command = [sys.executable, "-m", _LAUNCHER, f"--world_info={nodes}", "--master_addr=127.0.0.1"]
    command += ["--no_local_rank", "--quiet", "--module", module, *arguments]
    killed_before = num_oom_kills()
    with meeting.place() as told:
        # A session of its own: a Ctrl-C in the terminal would reach the launcher too, which gives its processes 30
        # seconds (launch.py, terminate_process_tree), and saving a large model may take longer.
        end_with_us = partial(end_with_parent, os.getpid(), signal.SIGTERM)
        child = subprocess.Popen(command, env=environment | told, start_new_session=True, preexec_fn=end_with_us)
        with _Forwarding(child.pid) as forwarding:
            code = child.wait()
    if forwarding.asked and code != RunError.exit_code:  # a run that was asked to stop, and could not save, failed
        return INTERRUPTED
    if is_kill(code):
        print(f"failed: {kill_message(killed_before)}", file=sys.stderr)
    return code


def is_kill(code: int) -> bool:
    """Whether an exit code of the launcher says that a training process ended by SIGKILL, or the launcher did."""
    # It passes the negative number on, of which the shell's eight bits remain; shells themselves say 128 + 9.
    return code in (-signal.SIGKILL, 256 - signal.SIGKILL, 128 + signal.SIGKILL)


def kill_message(killed_before: int | None) -> str:
    killed = num_oom_kills()
    if killed is None or killed_before is None:
        evidence = "most likely by the kernel, for want of memory (its counter cannot be read here; see dmesg)"
    elif killed > killed_before:
        evidence = f"by the kernel, for want of memory: it has killed {killed - killed_before} here since the start"
    else:
        evidence = "from outside: the kernel's count of processes killed for want of memory has not moved"
    return f"a training process was killed (SIGKILL), {evidence}"


OUT_OF_MEMORY = 12
"""Exit code of a training process that ran out of memory and said so (ENOMEM)."""
INTERRUPTED = 130
"""Exit code of a run that was asked to stop (128 + SIGINT, as shells have it)."""


class _Forwarding:
    """Passes requests to stop from this process to the training processes while they run."""

    def __init__(self, launcher_pid: int):
        self._launcher_pid = launcher_pid
        self._before: dict[signal.Signals, Any] = {}
        self.asked = False

    def __enter__(self) -> _Forwarding:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._launcher_pid)
            trainers = started.children()
            ready = [process for process in trainers if _takes_requests(process.pid)]
            if not self.asked:
                what = "stopping at the end of this step, and saving" if ready else "stopping before the first step"
                print(f"{what}; Ctrl-C again leaves at once", flush=True)
            elif number == signal.SIGINT:
                for process in [*started.children(recursive=True), started]:
                    process.kill()
            if not trainers:
                started.terminate()  # it has started none yet
            for process in trainers:
                # They say by which signal they were asked; one that still loads torch is ended by SIGTERM, silently.
                is_ctrl_c = number == signal.SIGINT and process in ready
                process.send_signal(signal.SIGINT if is_ctrl_c else signal.SIGTERM)
        self.asked = True


def _takes_requests(pid: int) -> bool:
    """Whether a training process handles SIGTERM by now, as `stopping.StopRequest` makes it do."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("SigCgt:"):  # proc(5): a mask in hexadecimal, bit 0 for signal 1
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def lone_environment() -> dict[str, str]:
    """What DeepSpeed's launcher tells the only process of a run."""
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
