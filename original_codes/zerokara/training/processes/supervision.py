"""Start and end of training processes, for the parent and for themselves: exit codes, signals. Without torch.

The launching process passes a request to stop on as SIGTERM (`SignalForwarding`); a training process answers it by
saving at the end of its step (`StopRequest`).
"""

import atexit
import contextlib
import importlib
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import NoReturn

from zerokara.base.progress import log

RENDEZVOUS_NAME = "ZEROKARA_RENDEZVOUS"
"""Environment variable with the rendezvous of the training processes: the path of a file on one machine; on several the
host and port of their store, and a text that tells this start of the processes from others."""
FOLDER_NAME = "ZEROKARA_RUN_FOLDER"
"""Environment variable with the number of the machine that owns the run folder, found by `nodes.rendezvous`; it stays
right where machines are lost or come back."""
OUT_OF_MEMORY = 12
"""Exit code of a training process that ran out of memory and reported it (ENOMEM)."""
LOST_CONNECTION = 13
"""Exit code of a training process that lost the connection to the others, and is not at fault."""


def forked(module: str, *arguments: str) -> None:
    """Act as ``python -m module arguments`` in a fork of the launching process; for torch's agent.

    Where all is well it returns, as the agent expects: the fork then waits until all processes are done.
    """
    parent = os.getppid()
    os.setsid()
    _restore_signals()
    # Exit functions of the launching process are not this one's.
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = importlib.import_module(module).main(arguments)
    _restore_signals()  # a request to stop ends it now
    if code or os.getppid() != parent:
        leave(code)
    atexit._run_exitfuncs()


def _restore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


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


class SignalForwarding:
    """Forwards requests to stop from this process to the training processes, as SIGTERM; a context manager."""

    def __init__(self, pids: Callable[[], Sequence[int]]):
        """`pids` gives the training processes, each the leader of a session; none before they are started."""
        self._pids = pids
        self.requested = False
        """True once somebody has asked to stop."""

    def __enter__(self) -> "SignalForwarding":
        numbers = [signal.SIGINT, signal.SIGTERM]
        numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []  # nohup
        self._previous = {number: signal.signal(number, self._forward) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        pids, is_second = self._pids(), self.requested and number == signal.SIGINT
        self.requested = True
        if not pids or is_second:
            kill(pids)
            raise KeyboardInterrupt
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        # Afterwards: the terminal, or `tee`, may be gone already.
        log("stopping: the run saves after this step (before the first step it ends at once); Ctrl-C again kills it")


def kill(pids: Iterable[int]) -> None:
    """Kill processes, each with its session."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


class StopRequest:
    """Request to stop this process, by SIGTERM, SIGINT (Ctrl-C), or in the first process by other `reasons`.

    The processes agree on it through the sum of each step's loss, and save at the end of the step. A second Ctrl-C
    exits at once, as does any request before the first step, when there is nothing to save.
    """

    def __init__(self) -> None:
        self.reason = ""
        """Source of the request; empty while there is none."""
        self.at_once = True
        """True while there is nothing to save yet, so that a request does not wait for the end of a step."""
        self.reasons: list[Callable[[], str]] = []
        """Called after each step, in the first process: each returns a reason to stop, or nothing."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def poll(self) -> bool:
        """Return True if this process has a request."""
        for reason in self.reasons:
            self.reason = self.reason or reason()
        return bool(self.reason)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_second = bool(self.reason) and number == signal.SIGINT
        name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else signal.Signals(number).name
        self.reason = self.reason or name
        if is_second or self.at_once:
            raise KeyboardInterrupt(self.reason)
