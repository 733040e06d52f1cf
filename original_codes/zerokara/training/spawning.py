"""Starting the training processes of a plan from the launching process."""

from __future__ import annotations

from dataclasses import dataclass

from zerokara.progress import plural
from zerokara.training.nodes.machines import HOST, JOIN, Machines, without_values
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes import launcher


@dataclass(frozen=True)
class Commands:
    """How the training processes are started, and what a person types."""

    module: str
    """Run by each training process: ``python -m module arguments``."""
    title: str
    """What the step is called, at the head of its plan."""
    arguments: tuple[str, ...]
    resume: str
    """Resumes the run."""
    convert: str
    """Converts what the run has made so far."""


def spawn(plan: RunPlan, commands: Commands, *further: str, machines: Machines | None = None) -> int:
    """Run the training processes, with `further` arguments; return their exit code, 0 or another.

    Those of this machine alone, or as one of several `machines`.

    Raises:
        KeyboardInterrupt: they were asked to stop.
    """
    arguments = without_values(commands.arguments, (JOIN, HOST))
    arguments = [argument for argument in arguments if argument not in ("--redo", "--dry-run")]
    chosen = {**{each.key: each.value for each in plan.advice}, "micro_batch_size": plan.config.micro_batch}
    for key, value in chosen.items():
        arguments += ["--set", f"{key}={value}"]
    arguments += further
    if machines is not None and machines.are_several:
        code = machines.run(commands.module, arguments, plan)
    else:
        code = launcher.launch(commands.module, arguments, plan.num_processes)
    if code == launcher.INTERRUPTED:
        raise KeyboardInterrupt
    return code


def processes_text(plan: RunPlan) -> str:
    """Return how many processes a plan has, for people."""
    return plural(plan.num_processes, "process", "processes")
