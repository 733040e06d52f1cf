"""The programs of small runs; real runs are those of tests/pipeline."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from configs import config_of

from zerokara.errors import RunError
from zerokara.forecast import ladder
from zerokara.forecast.machine import Planner
from zerokara.forecast.runs import Running, SmallRuns
from zerokara.forecast.seats import seats
from zerokara.forecast.sizes import Speed

WAITING = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_all_are_ended_and_none_begins() -> None:
    running, codes = Running(), []
    threads = [threading.Thread(target=lambda: codes.append(running.run(WAITING, None, {}))) for _ in range(2)]
    for thread in threads:
        thread.start()
    while len(running) < 2:
        time.sleep(0.01)
    running.stop()
    for thread in threads:
        thread.join(10)
    assert codes == [-signal.SIGTERM] * 2 and len(running) == 0
    with pytest.raises(KeyboardInterrupt):
        running.run(WAITING, subprocess.DEVNULL, {})


def test_one_that_fails_calls_off_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: SmallRuns, *_: Any) -> None:
        raise RunError("a small run ended")

    monkeypatch.setattr(SmallRuns, "_train", fail)
    monkeypatch.setattr(SmallRuns, "_key", lambda self, rung: str(rung))
    rungs = ladder.climb(ladder.shapes(config_of(seq_len=256), 4000), Speed(1e-5, 1e-11), ladder.Means(3600, 1, 1e9, 0))
    with pytest.raises(RunError, match="ended"):
        SmallRuns(Planner(tmp_path / "none.yaml", ()), tmp_path / "runs").measure(rungs, Speed(0, 1e-12), seats(2, 0))
