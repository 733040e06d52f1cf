"""Measures CPU time in seconds of a quiet core, so that a test can bound it on a slow or busy machine."""

import time
from collections.abc import Callable
from itertools import pairwise

LOOPS = 400_000
SECONDS = 0.01
"""CPU time of `LOOPS` turns on the quiet core on which the bounds were chosen (EPYC, Python 3.11)."""


def seconds_of(work: Callable[[], object]) -> float:
    """Run `work`; return its CPU time [s], scaled by how long a known loop took before and after it."""
    times = [time.process_time()]
    for part in (_loop, work, _loop):
        part()
        times.append(time.process_time())
    before, spent, after = (end - start for start, end in pairwise(times))
    return spent / max(before, after) * SECONDS


def _loop() -> None:
    for _ in range(LOOPS):
        pass
