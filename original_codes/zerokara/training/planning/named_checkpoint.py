"""Which checkpoint of a run is meant by a name."""

from __future__ import annotations

from pathlib import Path

from zerokara import checkpoint
from zerokara.errors import Fault, UserError
from zerokara.training.planning.run_plan import RunPlan


def find(plan: RunPlan, name: str) -> Path:
    """The checkpoint that is meant by `name`, once it was found whole and fitting: a folder, or a name or a step in the
    run folder (``global_step100``, ``100``, ``best``), or if it is empty the newest.

    Raises:
        UserError: there is no such checkpoint, it is broken, it is of another model, or there is nothing to validate
            with.
    """
    run_dir = plan.run_dir
    if not plan.num_valid_tokens:
        rule = "step 2 kept no documents for validation"
        raise UserError(plan.given.fault("valid_fraction", rule, "give it a share, and run step 2 again with --redo"))
    if not name:
        newest = checkpoint.newest_complete(run_dir)
        if newest is None:
            raise UserError(Fault(where=str(run_dir), rule="holds no whole checkpoint", remedy="train first"))
        folder = newest
    else:
        marked = run_dir / name  # `best` and `latest` are files that name a checkpoint
        named = marked.read_text(encoding="utf-8").strip() if marked.is_file() else name
        number = int(name) if name.isdecimal() else -1
        candidates = [Path(named), run_dir / named, checkpoint.folder_of(run_dir, number)]
        there = [path for path in candidates if path.is_dir()]
        if not there:
            steps = ", ".join(str(step) for step in checkpoint.all_steps(run_dir)) or "none"
            rule = f"is no checkpoint, neither by itself nor in {run_dir}; that has those of the steps {steps}"
            raise UserError(Fault(where="--evaluate", rule=rule, value=name))
        folder = there[0]
        checkpoint.check(folder)
    state = checkpoint.read_state(folder)
    for what, was, now in (
        ("model", state.shape, plan.shape.as_json()),
        ("tokenizer", state.tokenizer_sha256, plan.tokenizer_sha256),
    ):
        if was != now:
            raise UserError(Fault(where=str(folder), rule=f"is of another {what} than the configuration's"))
    return folder
