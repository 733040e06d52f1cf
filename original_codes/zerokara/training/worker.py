"""A training process: what it does with its plan, with failures of memory and connections explained."""

from __future__ import annotations

from pathlib import Path

from zerokara.training import checkpoint_evaluation, out_of_memory
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes import joining
from zerokara.training.trainer import train_plan
from zerokara.training.trial import run_trial


def work(plan: RunPlan, is_trial: bool = False, evaluate: Path | None = None) -> None:
    """Train a plan; or only try a few steps, or evaluate a checkpoint."""
    with out_of_memory.explained(plan, joining.local_device()):
        if is_trial:
            run_trial(plan)
        elif evaluate is not None:
            checkpoint_evaluation.evaluate(plan, evaluate)
        else:
            train_plan(plan)
