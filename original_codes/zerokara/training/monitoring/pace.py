"""Speed of a run and the time it will still take: the steps that are left, the validations and the saves.

The time of a step is an exponential moving average over the last steps. A kind of pause that this start has not had yet
(a validation before the first one) counts nothing; once measured, each further one counts as long as the last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_KEEP = 0.98
"""Weight of a step relative to the one after it: the average is over some fifty steps."""


class Pace:
    """The pace of one start."""

    def __init__(self, num_steps: int, intervals: dict[str, int]):
        """`intervals`: steps between two pauses of each kind (validation, save); the last step has all kinds."""
        self._num_steps, self._intervals = num_steps, intervals
        self._pauses = dict.fromkeys(intervals, 0.0)
        self._seconds = self._weight = self._paused = 0.0
        self._steps = 0

    def step(self, seconds: float) -> None:
        """Add the time of one step."""
        if self._steps == 1:  # the first step of a start is slow, unlike all others
            self._seconds = self._weight = 0.0
        self._steps += 1
        self._seconds = self._seconds * _KEEP + seconds
        self._weight = self._weight * _KEEP + 1

    @contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """Measure a pause of this kind, for as long as the block lasts."""
        started = time.monotonic()
        yield
        self._pauses[kind] = time.monotonic() - started
        self._paused += self._pauses[kind]

    def take_paused(self) -> float:
        """Return the time of all pauses since the last call."""
        paused, self._paused = self._paused, 0.0
        return paused

    @property
    def seconds_per_step(self) -> float:
        """Time of a step without pauses; 0 before the first step."""
        return self._seconds / self._weight if self._weight else 0.0

    def seconds_left(self, step: int) -> float:
        """Time from the end of `step`, its own pauses included, to the end of the run."""
        left = (self._num_steps - step) * self.seconds_per_step
        for kind, interval in self._intervals.items():
            num_pauses = self._num_steps // interval - (step - 1) // interval + bool(self._num_steps % interval)
            left += num_pauses * self._pauses[kind]
        return left
