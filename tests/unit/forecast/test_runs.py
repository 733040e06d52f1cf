"""The programs of small runs; real runs are those of tests/pipeline."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from zerokara.forecast.runs import Running

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
