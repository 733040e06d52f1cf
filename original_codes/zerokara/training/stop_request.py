"""What a training process does on SIGTERM, Ctrl-C, the file STOP and its limits: it saves at the end of the step."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

STOP_NAME = "STOP"
"""``touch STOP`` in the run folder asks, from any machine that sees it."""


class StopRequest:
    """Request to stop this process, by SIGTERM, SIGINT (Ctrl-C), or in the first process by other `reasons`.

    The processes agree in the sum of each step's loss, and save at the end of the step. A second Ctrl-C exits at once,
    as does any request before the first step, when there is nothing to save.
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

    def watch_file(self, path: Path) -> None:
        """Stop when a file appears; one that is there was meant for an earlier start, and is deleted."""
        path.unlink(missing_ok=True)
        self.reasons.append(lambda: f"the file {path}" if path.exists() else "")

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
