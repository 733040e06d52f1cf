"""Launching the training processes of one node, and ending all of them when one ends in failure.

Each gets RANK, LOCAL_RANK and WORLD_SIZE, as torchrun has it. DeepSpeed's launcher is not used: it imports DeepSpeed
first, which takes seconds, and where a process dies it waits half a minute for each of the others, one after another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import psutil

from zerokara.config.machine import MachineSettings
from zerokara.errors import INTERRUPTED, RunError
from zerokara.model import loopback
from zerokara.parent_death_signal import end_with_parent
from zerokara.progress import plural
from zerokara.resources import available_cores, num_oom_kills
from zerokara.training.planning import processors
from zerokara.training.planning.schedule import STARTED_NAME
from zerokara.training.processes import rendezvous

OUT_OF_MEMORY = 12
"""Exit code of a training process that ran out of memory and reported it (ENOMEM)."""
LOST_CONNECTION = 13
"""Exit code of a training process that lost the others: it can do nothing for it."""
END_SECONDS = 15.0
"""How long after one process has failed the others may take to end. One that waits for a collective in C or on the
device never runs a signal handler, and is killed then."""
_POLL_SECONDS = 0.2


def may_restart(exit_code: int) -> bool:
    """Whether a process that ended so may do better if it is started again: it was killed, or lost another."""
    return exit_code < 0 or exit_code == LOST_CONNECTION


def _cuda() -> Any:
    """torch.cuda. Importing torch takes about a second, and happens only after the configuration was checked."""
    import torch

    return torch.cuda


def _num_gpus() -> int:
    """GPUs that torch sees; one that was built for the CPU alone need not be imported for it."""
    return _cuda().device_count() if processors.built_for_gpus() else 0


def num_processes(config: MachineSettings) -> int:
    """Processes to start: the configured number, or one for each GPU that torch sees, or at least one on a CPU.

    Raises:
        UserError: more are configured than there are GPUs or cores; or torch does not see a GPU that is named.
    """
    num_gpus = _num_gpus()
    processors.check_processes(config, num_gpus)
    return max(1, num_gpus) if config.num_processes == "auto" else config.num_processes


def precision(config: MachineSettings) -> Literal["bf16", "fp32"]:
    """The configured precision; for ``auto`` bf16 where the device computes in it, fp32 where it would emulate it."""
    if config.precision != "auto":
        return config.precision
    if _num_gpus():
        return "bf16" if _cuda().is_bf16_supported(including_emulation=False) else "fp32"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return "bf16" if "amx_bf16" in flags or "avx512_bf16" in flags else "fp32"


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU; None if torch sees none."""
    properties = [_cuda().get_device_properties(index) for index in range(_num_gpus())]
    return min((each.total_memory for each in properties), default=None)


def device_rows(num_processes: int) -> list[tuple[str, str]]:
    """The devices of the training processes, as rows of the plan; with a note if they may not be the ones intended."""
    num_gpus = _num_gpus()
    if num_gpus:
        names = Counter(_cuda().get_device_name(index) for index in range(num_processes))
        device = "GPU, " + ", ".join(f"{number} × {name}" for name, number in names.items())
        device += f" ({num_gpus - num_processes} more not used)" if num_gpus > num_processes else ""
    else:
        num_cores, num_threads = plural(available_cores(), "core"), plural(processors.threads(num_processes), "thread")
        device = f"CPU, {num_cores}, {num_threads} a process"
    note = processors.unused(num_gpus)
    return [("device", device), *([("note", note)] if note else [])]


def launch(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run ``python -m module arguments`` in `processes` processes on this node; return the exit code.

    It is that of the first process that fails; the others are ended within `END_SECONDS`. Ctrl-C, SIGTERM and SIGHUP
    ask the training processes to stop at the end of a step, and give the exit code 130 (or 1 if they could not save); a
    second Ctrl-C kills them. If this process is killed, they save and exit. A process that was killed is reported with
    the likely reason.
    """
    environment = {**os.environ, **loopback.environment(), **process_environment(processes)}
    oom_kills_before = num_oom_kills()
    # A session of its own for each: it does not get a Ctrl-C in the terminal a second time, and is killed with all that
    # it has started.
    end_with_us = partial(end_with_parent, os.getpid(), signal.SIGTERM)
    with rendezvous.held() as variables:
        started = [
            subprocess.Popen(
                [sys.executable, "-u", "-m", module, *arguments],
                env=environment | variables | rank_environment(rank, processes),
                start_new_session=True,
                preexec_fn=end_with_us,
            )
            for rank in range(processes)
        ]
        with SignalForwarding(started) as forwarding:
            code = _wait(started)
    if forwarding.requested and code != RunError.exit_code:  # a run that was asked to stop, and could not save, failed
        return INTERRUPTED
    if code == -signal.SIGKILL:
        print(f"failed: {kill_message(oom_kills_before)}", file=sys.stderr)
    return code


def end_with_agent() -> None:
    """In a training process that torch's agent has started: ask for SIGTERM when the agent dies, and so save."""
    if rendezvous.store_address():
        end_with_parent(os.getppid(), signal.SIGTERM)


def process_environment(processes: int) -> dict[str, str]:
    """What each of this machine's training processes finds in its environment, beside what was there."""
    environment = {STARTED_NAME: str(psutil.Process().create_time())}
    environment["PYTHONSAFEPATH"] = "1"  # a file of the current folder is not imported as a package of the same name
    if not _num_gpus():
        return environment | {"DS_ACCELERATOR": "cpu", processors.VARIABLE: "", **processors.cpu_environment(processes)}
    named = processors.named_gpus()
    devices = named[:processes] if named else [str(number) for number in range(processes)]
    return environment | {processors.VARIABLE: ",".join(devices)}


def rank_environment(rank: int, num_processes: int) -> dict[str, str]:
    """Environment of a process among those of one node, as torchrun has it."""
    size = str(num_processes)
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all processes have ended; return the exit code of the first that failed, or 0."""
    running, code, kill_at = list(started), 0, 0.0
    while running:
        time.sleep(_POLL_SECONDS)
        for process in [each for each in running if each.poll() is not None]:
            running.remove(process)
            if process.returncode and not code:
                code, kill_at = process.returncode, time.monotonic() + END_SECONDS
                for other in running:
                    other.terminate()
        if code and time.monotonic() > kill_at:
            _kill(running)
    return code


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

    def __init__(self, started: Sequence[subprocess.Popen[bytes]]):
        """`started` are the training processes, each the leader of a session."""
        self._started = started
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
        ready = [process for process in self._started if _handles_sigterm(process.pid)]
        if not self.requested:
            when = "at the end of this step, and saving" if ready else "before the first step"
            print(f"stopping {when}; Ctrl-C again kills the run at once", flush=True)
        is_second_ctrl_c = self.requested and number == signal.SIGINT
        self.requested = True
        if is_second_ctrl_c:
            _kill(self._started)
        for process in self._started:
            # They log which signal they got; one that still imports torch is ended by SIGTERM, without a traceback.
            process.send_signal(signal.SIGINT if number == signal.SIGINT and process in ready else signal.SIGTERM)


def _kill(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill processes, each with its session."""
    for process in started:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _handles_sigterm(pid: int) -> bool:
    """Whether a training process already handles SIGTERM, by `stopping.StopRequest.listen`."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("SigCgt:"):  # proc(5): a mask in hexadecimal, bit 0 for signal 1
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False
