"""The cores that there are for this user, and how training processes on a CPU share them. Without torch."""

from __future__ import annotations

import os

from zerokara.resources import available_cores

_THREADS_NAME = "OMP_NUM_THREADS"
_WAIT_NAME = "OMP_WAIT_POLICY"


def threads(num_processes: int) -> int:
    """Threads for each process: as OMP_NUM_THREADS says, or the cores that there are shared out."""
    given = os.environ.get(_THREADS_NAME, "").partition(",")[0].strip()  # `4,2` is for loops within loops
    return int(given) if given.isdecimal() and int(given) else max(1, available_cores() // num_processes)


def environment(num_processes: int) -> dict[str, str]:
    """What a process that computes on a CPU must find in its environment before it loads torch, but for what is there.

    A thread that waits for the next piece of work sleeps. OpenMP's own default is to spin for milliseconds: nothing is
    gained alone, and of two programs on the same cores each waits most of the time for the other's threads, which do
    nothing (docs/decisions.md has the numbers).
    """
    wanted = {_THREADS_NAME: str(threads(num_processes)), _WAIT_NAME: "PASSIVE"}
    return {name: os.environ.get(name) or value for name, value in wanted.items()}
