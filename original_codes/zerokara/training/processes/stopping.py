"""Requests to stop: a signal, a file, or a limit asks; the run is saved at the end of the step and exits.

Every process handles SIGTERM and SIGINT (Ctrl-C); the first one also watches the file ``STOP`` in the run folder, and
asks other `reasons`. The processes agree in a collective that runs anyway, the sum of each step's loss. A
second Ctrl-C exits at once, as does any request before the first step, when there is nothing to save.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

FILE_NAME = "STOP"
"""``touch STOP`` in the run folder asks, from any machine that sees it."""
_SIGNAL_NAMES = {int(signal.SIGINT): "Ctrl-C (SIGINT)"}


class StopRequest:
    """Whether this process was asked to stop: it handles SIGTERM and SIGINT as requests from now on."""

    def __init__(self) -> None:
        self.reason = ""
        """Who asked; empty while nobody has."""
        self.at_once = True
        """Whether there is nothing to save yet, so that a request does not wait for the end of a step."""
        self.reasons: list[Callable[[], str]] = []
        """Asked after each step, in the first process: each returns a reason to stop, or nothing."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def watch_file(self, path: Path) -> None:
        """Take a file that appears for a request; one that is there was meant for an earlier start, and is deleted."""
        path.unlink(missing_ok=True)
        self.reasons.append(lambda: f"the file {path}" if path.exists() else "")

    def poll(self) -> bool:
        """Whether this process has a request."""
        for reason in self.reasons:
            self.reason = self.reason or reason()
        return bool(self.reason)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = bool(self.reason) and number == signal.SIGINT
        self.reason = self.reason or _SIGNAL_NAMES.get(number, signal.Signals(number).name)
        if again or self.at_once:
            raise KeyboardInterrupt(self.reason)
