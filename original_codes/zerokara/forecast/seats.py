"""Places where small runs train beside each other: each has cores of its own, or a GPU.

A tiny model keeps neither many cores nor a GPU busy; as many runs as there are places take little longer than one.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from zerokara.resources import available_cores, available_memory
from zerokara.training.planning.processors import VARIABLE, named_gpus

SEAT_BYTES = 1.5e9
"""Main memory for a small run: twice what one of a million parameters holds."""


@dataclass(frozen=True)
class Seat:
    """Where one run trains."""

    cores: tuple[int, ...]
    gpu: str | None = None
    """By number or UUID, as CUDA_VISIBLE_DEVICES names it."""

    @property
    def environment(self) -> dict[str, str]:
        """What the run finds in its environment beside what is there."""
        return {} if self.gpu is None else {VARIABLE: self.gpu}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Let this thread, and the programs that it starts meanwhile, run on these cores alone."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def seats(most: int, num_gpus: int) -> list[Seat]:
    """Up to `most` places that share out the GPUs, or the cores where there is none."""
    cores = sorted(os.sched_getaffinity(0))[: available_cores()]
    gpus = named_gpus() or [str(number) for number in range(num_gpus)]
    by_memory = int(available_memory() // SEAT_BYTES)
    number = max(1, min(most, len(cores), by_memory, *([num_gpus] if num_gpus else [])))
    return [Seat(tuple(cores[each::number]), gpus[each] if num_gpus else None) for each in range(number)]


def makespan(seconds: Sequence[float], num_seats: int) -> float:
    """How long runs of so many seconds take where the longest waiting one begins as soon as a place is free."""
    ends = [0.0] * num_seats
    for each in sorted(seconds, reverse=True):
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)
