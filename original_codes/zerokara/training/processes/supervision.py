"""Start and end of training processes, for the parent and for themselves: exit codes, signals. Without torch."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import re
import signal
import sys
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from zerokara.resources import content, control_groups

RENDEZVOUS_NAME = "ZEROKARA_RENDEZVOUS"
"""Environment variable with the rendezvous of the training processes: the path of a file on one machine; on several the
host and port of their store, and a text that tells this start of the processes from others."""
FOLDER_NAME = "ZEROKARA_RUN_FOLDER"
"""Environment variable with the number of the machine that owns the run folder, found by `nodes.rendezvous`; it stays
right where machines are lost or come back."""
OUT_OF_MEMORY = 12
"""Exit code of a training process that ran out of memory and reported it (ENOMEM)."""
LOST_CONNECTION = 13
"""Exit code of a training process that lost the others: it can do nothing for it."""


def forked(module: str, *arguments: str) -> NoReturn:
    """Act as ``python -m module arguments`` in a fork of the launching process; for torch's agent."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    # Exit functions of the launching process are not this one's.
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    leave(importlib.import_module(module).main(arguments))


def leave(code: int) -> NoReturn:
    """End this process with an exit code as a fork of `multiprocessing` does, without taking the interpreter apart.

    gloo's threads live as long as the process groups, which are in global variables. One that lets go of its last
    tensor while that happens ends in C++ that must not throw: ``terminate called without an active exception``, exit
    code -6, after everything was saved (once in some hundred ends on a busy machine).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def num_oom_kills() -> int | None:
    """Count the processes that the kernel has killed for lack of memory, in this control group or on the machine."""
    for path in (*(folder / "memory.events" for folder in control_groups()), Path("/proc/vmstat")):
        if found := re.search(r"^oom_kill (\d+)$", content(path), re.MULTILINE):
            return int(found[1])
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
        self.requested = False
        """True once somebody has asked to stop."""

    def __enter__(self) -> SignalForwarding:
        numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        self._previous = {number: signal.signal(number, self._forward) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if not self.pids:
            raise KeyboardInterrupt
        # Those that handle SIGTERM already, by `loop.StopRequest`; proc(5): a mask in hexadecimal, bit 0 for signal 1.
        status = {pid: content(Path(f"/proc/{pid}/status")) for pid in self.pids}
        caught = {pid: re.search(r"^SigCgt:\s*(\w+)$", text, re.MULTILINE) for pid, text in status.items()}
        ready = [pid for pid, mask in caught.items() if mask and int(mask[1], 16) >> (signal.SIGTERM - 1) & 1]
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
