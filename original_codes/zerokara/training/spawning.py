"""Starting the training processes of a plan from the launching process: they get the plan as a file."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerokara.progress import plural
from zerokara.training.nodes.machines import Machines
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan
from zerokara.training.processes import launcher


@dataclass(frozen=True)
class Commands:
    """What the step is called, and what a person types after it."""

    title: str
    """At the head of its plan."""
    resume: str
    """Resumes the run."""
    convert: str
    """Converts what the run has made so far."""


def spawn(plan: RunPlan, *work: str, machines: Machines | None = None, path: Path | None = None) -> int:
    """Run the training processes, which do `work` (`worker.main`); return their exit code, 0 or another.

    Those of this machine alone, or as one of several `machines`. `path` is the file of the plan, where the run folder
    has one; otherwise a temporary one is written.

    Raises:
        KeyboardInterrupt: they were asked to stop.
    """
    with contextlib.nullcontext(path) if path else _temporary(plan) as plan_path:
        arguments = [str(plan_path), *work]
        if machines is not None and machines.are_several:
            code = machines.run(plan.task.worker, arguments, plan)
        else:
            code = launcher.launch(plan.task.worker, arguments, plan.num_processes)
    if code == launcher.INTERRUPTED:
        raise KeyboardInterrupt
    return code


@contextlib.contextmanager
def _temporary(plan: RunPlan) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="zerokara-plan-") as folder:
        plan.write(path := Path(folder, PLAN_NAME))
        yield path


def processes_text(plan: RunPlan) -> str:
    """Return how many processes a plan has, for people."""
    return plural(plan.num_processes, "process", "processes")
