"""The cores that there are for this user, and how training processes on a CPU share them. Without torch."""

from __future__ import annotations

import os

from zerokara.machine_memory import control_groups

_THREADS_NAME = "OMP_NUM_THREADS"
_WAIT_NAME = "OMP_WAIT_POLICY"


def available() -> int:
    """Cores that this process may run on (taskset, Slurm), and no more than its control groups give it the time of."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas()]))


def threads(num_processes: int) -> int:
    """Threads for each process: as OMP_NUM_THREADS says, or the cores that there are shared out."""
    given = os.environ.get(_THREADS_NAME, "").partition(",")[0].strip()  # `4,2` is for loops within loops
    return int(given) if given.isdecimal() and int(given) else max(1, available() // num_processes)


def environment(num_processes: int) -> dict[str, str]:
    """What a process that computes on a CPU must find in its environment before it loads torch, but for what is there.

    A thread that waits for the next piece of work sleeps. OpenMP's own default is to spin for milliseconds: nothing is
    gained alone, and of two programs on the same cores each waits most of the time for the other's threads, which do
    nothing (docs/decisions.md has the numbers).
    """
    wanted = {_THREADS_NAME: str(threads(num_processes)), _WAIT_NAME: "PASSIVE"}
    return {name: os.environ.get(name) or value for name, value in wanted.items()}


def _quotas() -> list[int]:
    """Whole cores whose time each control group may take (version 2), where it has a limit."""
    found = []
    for folder in control_groups():
        try:
            time, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        except (OSError, ValueError):  # the root has none, nor has a group without the controller
            continue
        if time != "max":
            found.append(int(time) // int(period))
    return found
