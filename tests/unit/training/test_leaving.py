"""How a training process ends."""

from __future__ import annotations

import subprocess
import sys

from tiny import ROOT

SCRIPT = """
import atexit
from zerokara.training.processes import leaving

class Late:
    def __del__(self):
        print("taken apart", flush=True)

late = Late()
atexit.register(print, "exit function", end="")
leaving.leave(3)
"""


def test_what_ends_runs_its_exit_functions_and_is_not_taken_apart() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT / "original_codes", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "exit function", "")
