"""The cores that there are for this user, and how training processes on a CPU share them. Without torch."""

from __future__ import annotations

import os

from zerokara.resources import available_cores

_THREADS_NAME = "OMP_NUM_THREADS"
_WAIT_NAME = "OMP_WAIT_POLICY"
MIN_PROCESS_TOKENS = 2048
"""Of a step, for each process on a CPU: with fewer its matrices are too small to be worth a process."""


def threads(num_processes: int) -> int:
    """Threads for each process: as OMP_NUM_THREADS says, or the cores that there are shared out."""
    return _given_threads() or max(1, available_cores() // num_processes)


def _given_threads() -> int:
    """What OMP_NUM_THREADS says; 0 where it says nothing."""
    given = os.environ.get(_THREADS_NAME, "").partition(",")[0].strip()  # `4,2` is for loops within loops
    return int(given) if given.isdecimal() else 0


def process_counts(batch_tokens: int) -> list[int]:
    """Numbers of training processes that share out the cores of a CPU, the most first; the last is 1.

    The threads of one process wait for each other at every small operation, those of several only once in a step: a
    small model trains up to twice as fast with a process on each core (docs/decisions.md).
    """
    cores = max(1, available_cores() // (_given_threads() or 1))
    counts = [count for count in range(cores, 1, -1) if cores % count == 0]
    return [*(count for count in counts if batch_tokens >= count * MIN_PROCESS_TOKENS), 1]


def environment(num_processes: int) -> dict[str, str]:
    """What a process that computes on a CPU must find in its environment before it loads torch, but for what is there.

    A thread that waits for the next piece of work sleeps. OpenMP's own default is to spin for milliseconds: nothing is
    gained alone, and of two programs on the same cores each waits most of the time for the other's threads, which do
    nothing (docs/decisions.md has the numbers).
    """
    wanted = {_THREADS_NAME: str(threads(num_processes)), _WAIT_NAME: "PASSIVE"}
    return {name: os.environ.get(name) or value for name, value in wanted.items()}
