"""Programs of the tests, started as training processes: ``python -m programs MODULE PROCESSES FILE``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from zerokara.training.launching import spawn
from zerokara.training.planning.processors import Devices
from zerokara.training.planning.run_plan import RunPlan


def launch(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run ``python -m module arguments`` as training processes; the first argument is a file, or stands for one."""
    settings, task = SimpleNamespace(max_restarts=0), SimpleNamespace(worker=module)
    plan = SimpleNamespace(
        task=task, processes_per_node=processes, devices=Devices(), requested=settings, run_dir=Path("run")
    )
    first, *others = arguments or ["none"]
    return spawn(cast(RunPlan, plan), *others, path=Path(first))


if __name__ == "__main__":
    module, processes, *arguments = sys.argv[1:]
    sys.exit(launch(module, arguments, int(processes)))
