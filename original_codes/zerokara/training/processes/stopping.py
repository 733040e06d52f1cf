"""Leaving at the edge of a step: a signal, a file, or a limit asks; the loop saves and goes.

SIGTERM and SIGINT (Ctrl-C) are heard by every process that gets them; the file ``STOP`` in the run folder, and whatever
else `watch` was given, by the first. A process that is asked tells the others where all meet anyway: in the sum over
the loss of each step, or in `agreed`. A second Ctrl-C leaves at once, as does any request before the first step, when
there is nothing to save.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
import torch.distributed

FILE_NAME = "STOP"
"""``touch STOP`` in the run folder asks, from any machine that sees it."""
_NAMES = {int(signal.SIGINT): "Ctrl-C (SIGINT)"}


class StopRequest:
    """Whether somebody asked this process to stop."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.reason = ""
        """Who asked; empty while nobody has."""
        self._device = device
        self._at_once = True
        self._watched: list[Callable[[], str]] = []

    def listen(self) -> None:
        """Take SIGTERM and SIGINT as requests from now on."""
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def can_wait(self) -> None:
        """From now on there is something to save: requests are obeyed at the next edge of a step."""
        self._at_once = False

    def watch(self, look: Callable[[], str]) -> None:
        """Call `look` at each step's edge: it gives a reason to stop, or nothing. For the first process only."""
        self._watched.append(look)

    def look(self) -> bool:
        """Whether this process knows of a request, after a look at what it watches."""
        for look in self._watched:
            self.reason = self.reason or look()
        return bool(self.reason)

    def agreed(self) -> bool:
        """Whether any process knows of a request; every process must call it, between the batches of long work."""
        asked = torch.tensor([float(self.look())], device=self._device)
        torch.distributed.all_reduce(asked)
        return bool(asked.item())

    def _ask(self, number: int, frame: FrameType | None) -> None:
        again = bool(self.reason) and number == signal.SIGINT
        self.reason = self.reason or _NAMES.get(number, signal.Signals(number).name)
        if again or self._at_once:
            raise KeyboardInterrupt(self.reason)


class StopFile:
    """The file ``STOP`` of a run folder, for the first process."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / FILE_NAME

    def look(self) -> str:
        """A reason to stop, where the file is there."""
        return f"the file {self._path}" if self._path.exists() else ""

    def forget(self) -> None:
        """Delete it: it was obeyed, or speaks of an earlier start."""
        self._path.unlink(missing_ok=True)
