"""Programs of the tests: in a Python of their own, or as training processes.

``python -m programs MODULE PROCESSES FILE`` does the latter.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]


def run_program(text: str, *arguments: object, code: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a program that finds the package, and must end with this code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "original_codes")}
    command = [sys.executable, "-c", text, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120, **more)
    assert done.returncode == code, done.stderr
    return done


def launch(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run ``python -m module arguments`` as training processes; the first argument is a file, or stands for one."""
    from zerokara.training.planning.processors import Devices
    from zerokara.training.spawning import spawn

    settings, task = SimpleNamespace(max_restarts=0), SimpleNamespace(worker=module)
    plan = SimpleNamespace(
        task=task, processes_per_node=processes, devices=Devices(), requested=settings, run_dir=Path("run")
    )
    first, *others = arguments or ["none"]
    return spawn(cast(Any, plan), *others, path=Path(first))


if __name__ == "__main__":
    module, processes, *arguments = sys.argv[1:]
    sys.exit(launch(module, arguments, int(processes)))
