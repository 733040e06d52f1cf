"""How child processes begin and end, for the parent and for themselves: exit codes, signals. Without torch."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
import sys
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from zerokara.resources import control_groups, end_with_parent
from zerokara.training.planning.processors import PARENT_NAME

RENDEZVOUS_NAME = "ZEROKARA_RENDEZVOUS"
"""Environment variable that gives a training process the path of the file where the processes of one machine meet;
where machines are several, the host and port of their store, and what tells this start of the processes from others."""
FOLDER_NAME = "ZEROKARA_RUN_FOLDER"
"""Environment variable that gives a training process the number of the machine that speaks for its run folder, as
`nodes.meeting` has found it. It stays right where machines are lost or come back."""
OUT_OF_MEMORY = 12
"""Exit code of a training process that ran out of memory and reported it (ENOMEM)."""
LOST_CONNECTION = 13
"""Exit code of a training process that lost the others: it can do nothing for it."""


def forked(module: str, *arguments: str) -> NoReturn:
    """Be what ``python -m module arguments`` is, in a fork of the launching process; for torch's agent."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    # What the launching process wants to be done at its end is not this one's.
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    end_with_launcher()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    leave(importlib.import_module(module).main(arguments))


def leave(code: int) -> NoReturn:
    """End this process with an exit code, without taking the interpreter apart.

    gloo's threads live as long as their process groups, which torch, DeepSpeed and Megatron keep in global variables.
    One that lets go of its last tensor while the interpreter is being taken apart is ended in the middle of C++ that
    must not throw: ``terminate called without an active exception``, exit code -6, after everything was saved (once in
    some hundred ends on a busy machine). So this does what a forked process of `multiprocessing` does at its end.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_launcher() -> None:
    """Ask for SIGTERM when the launching process dies, and so save; for a training process."""
    if pid := os.environ.get(PARENT_NAME):
        end_with_parent(int(pid), signal.SIGTERM)


def num_oom_kills() -> int | None:
    """Processes that the kernel has killed for lack of memory, here (control group) or on the machine; None if unknown.

    Source: ``oom_kill`` in memory.events and /proc/vmstat.
    """
    for path in (*(folder / "memory.events" for folder in control_groups()), Path("/proc/vmstat")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


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

    def __init__(self, pids: Sequence[int] = ()):
        self.pids = pids
        """The training processes, each the leader of a session. While there are none, the request ends this process."""
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
        if not self.pids:
            raise KeyboardInterrupt
        ready = [pid for pid in self.pids if _handles_sigterm(pid)]
        if not self.requested:
            when = "at the end of this step, and saving" if ready else "before the first step"
            print(f"stopping {when}; Ctrl-C again kills the run at once", flush=True)
        if self.requested and number == signal.SIGINT:
            kill(self.pids)
        self.requested = True
        for pid in self.pids:
            # They log which signal they got; one that still imports torch is ended by SIGTERM, without a traceback.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT if number == signal.SIGINT and pid in ready else signal.SIGTERM)


def kill(pids: Iterable[int]) -> None:
    """Kill processes, each with its session."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _handles_sigterm(pid: int) -> bool:
    """Whether a training process already handles SIGTERM, by `loop.StopRequest`."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("SigCgt:"):  # proc(5): a mask in hexadecimal, bit 0 for signal 1
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False
