"""How fast a run goes, and how long it will still take: the steps that are left, the validations and the saves.

A step's time is a mean over the last steps, in which the newest counts most. What a start has not yet measured (a
validation before the first one) counts nothing, and is there from the first time on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_KEEP = 0.98
"""How much less each step counts than the one after it: the mean is over some fifty."""


class Pace:
    """The pace of one start."""

    def __init__(self, num_steps: int, intervals: dict[str, int]):
        """`intervals` are the steps between two pauses of each kind (validation, save); the last step has them all."""
        self._num_steps, self._intervals = num_steps, intervals
        self._pauses = dict.fromkeys(intervals, 0.0)
        self._seconds = self._weight = 0.0
        self._steps = 0

    def step(self, seconds: float) -> None:
        """Take in the time of one step."""
        if self._steps == 1:  # the first step of a start is slow, and tells nothing of the others
            self._seconds = self._weight = 0.0
        self._steps += 1
        self._seconds = self._seconds * _KEEP + seconds
        self._weight = self._weight * _KEEP + 1

    @contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """Measure a pause of this kind."""
        started = time.monotonic()
        yield
        self._pauses[kind] = time.monotonic() - started

    @property
    def seconds_a_step(self) -> float:
        """Time of a step, without pauses; 0 before the first."""
        return self._seconds / self._weight if self._weight else 0.0

    def seconds_left(self, step: int) -> float:
        """Time from the edge of `step`, its own pauses included, to the end of the run."""
        left = (self._num_steps - step) * self.seconds_a_step
        for kind, interval in self._intervals.items():
            times = self._num_steps // interval - (step - 1) // interval + bool(self._num_steps % interval)
            left += times * self._pauses[kind]
        return left
