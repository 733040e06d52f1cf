"""Leaving at the edge of a step: SIGTERM or Ctrl-C asks, the loop saves and goes; a second Ctrl-C leaves at once."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Whether somebody asked this process to stop."""

    def __init__(self) -> None:
        self.reason = ""

    def listen(self) -> None:
        """Take SIGTERM and SIGINT as requests from now on."""
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
