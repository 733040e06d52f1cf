"""Programs that measure in fresh processes: jobs go in as a file of JSON, the answers come on the last line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from zerokara.training.launching import spawn
from zerokara.training.planning.processors import Devices
from zerokara.training.planning.run_plan import RunPlan

NUMERICS = Path(__file__).parent / "numerics"


def answers_of(program: str, jobs: Mapping[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Run `program` of tests/numerics on all `jobs`, by name, and return the answer to each; it works in `folder`."""
    file = folder / "jobs.json"
    file.write_text(json.dumps(list(jobs.values())), encoding="utf-8")
    command = [sys.executable, str(NUMERICS / program), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(jobs, json.loads(done.stdout.splitlines()[-1]), strict=True))


def launch(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run ``python -m module arguments`` as training processes; the first argument is a file, or stands for one."""
    settings, task = SimpleNamespace(max_restarts=0), SimpleNamespace(worker=module)
    plan = SimpleNamespace(
        task=task, processes_per_node=processes, devices=Devices(), requested=settings, run_dir=Path("run")
    )
    first, *others = arguments or ["none"]
    return spawn(cast(RunPlan, plan), *others, path=Path(first))
