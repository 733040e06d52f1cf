"""CPU time as a quiet core would take it, so that a test may bound it on a machine that is slow or busy just then."""

import time
from collections.abc import Callable
from itertools import pairwise

LOOPS = 400_000
SECONDS = 0.01
"""Of `LOOPS` on a quiet core of a server of 2023."""


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of a quiet core that the work takes: its CPU time beside that of a known loop before and after it."""
    times = [time.process_time()]
    for part in (_loop, work, _loop):
        part()
        times.append(time.process_time())
    before, spent, after = (end - start for start, end in pairwise(times))
    return spent / max(before, after) * SECONDS


def _loop() -> None:
    for _ in range(LOOPS):
        pass
