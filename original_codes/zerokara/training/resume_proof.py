"""Proof that a run of this configuration, on this data and machine, resumes as if it had never been stopped.

In a temporary folder it trains 2·N steps unbroken; then N steps, and in new processes from their checkpoint N more.
Losses, weights and optimizer state must be those of the unbroken run: bit for bit where one process computes on a CPU.
Elsewhere the order of additions is not fixed, so that even two unbroken runs differ in the last digits: there
`LOSS_TOLERANCE` and `STATE_TOLERANCE` decide.
"""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerokara import checkpoint
from zerokara.base.durable import make_folders
from zerokara.base.errors import Fault, RunError, UserError
from zerokara.base.progress import bytes_text
from zerokara.training.monitoring import step_metrics
from zerokara.training.planning import run_folder
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan
from zerokara.training.spawning import spawn

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Nats per token, where bits may differ: ten times the difference that another distribution of the work makes."""
STATE_TOLERANCE = 0.1
"""Norm of the difference, as a share of what the last N steps changed. Adam turns the sign of a nearly zero gradient
into a whole step, so that last digits grow; a lost state, or other data, gives about 1."""
QUIET: dict[str, Any] = {
    **dict.fromkeys(("eval_interval", "save_interval"), 10**9),
    **dict.fromkeys(("plots", "tensorboard"), False),
    "sample_prompts": (),
    "max_hours": "auto",
    "wandb": "off",
}
"""A run that nobody watches trains to its end, is validated and saved there, and does nothing else."""


def prove(plan: RunPlan, num_steps: int) -> None:
    """Prove that a run of `plan` resumes, and print by how much it differs. The run's own folder is not touched.

    Raises UserError where the run is too short, RunError where the disk is too full or resume is not exact.
    """
    import torch

    if 2 * num_steps > plan.schedule.num_steps:
        rule = f"a proof of 2 × {num_steps} steps needs a run of as many; this one has {plan.schedule.num_steps}"
        remedy = f"at most --verify-resume {plan.schedule.num_steps // 2} fits"
        raise UserError(Fault(where="--verify-resume", value=num_steps, rule=rule, remedy=remedy))
    make_folders(plan.run_dir.parent)
    with tempfile.TemporaryDirectory(prefix=f"{plan.run_dir.name}.verify-resume.", dir=plan.run_dir.parent) as scratch:
        folder, needed = Path(scratch), 3 * plan.checkpoint_bytes
        if (free := shutil.disk_usage(folder).free) < needed:
            raise RunError(f"{folder}: a proof writes {bytes_text(needed)} of checkpoints, {bytes_text(free)} are free")
        print(f"proving resume in {folder}, which is deleted afterwards: {num_steps} and {num_steps} steps", flush=True)
        for name, last in (("unbroken", 2 * num_steps), ("resumed", num_steps), ("resumed", 2 * num_steps)):
            part = plan.with_settings(**QUIET, log_interval=1, keep_last=10, output_model_dir=str(folder / name))
            part = replace(part, requested=part.resolved)
            run_folder.claim(part)
            if code := spawn(part, "prove", str(last), path=part.run_dir / PLAN_NAME):
                raise RunError(f"a training ended with exit code {code}, so nothing is proved; its messages say why")
        loss, unequal, shares = compare(folder / "unbroken", folder / "resumed", num_steps)
    norms = " and ".join(f"{share:.1e}" for share in shares)
    print(f"losses differ by at most {loss:.1e}; {unequal:,} numbers of the state, by {norms} of their change")
    equal, tolerance = loss == 0 and not unequal, LOSS_TOLERANCE[plan.resolved.number_format]
    if not equal and plan.num_processes == 1 and not torch.cuda.is_available():
        raise RunError("resume is NOT exact: one process on a CPU must give equal bits")
    rule = f"losses within {tolerance:g}, state within {STATE_TOLERANCE:g}; processes and GPUs add up in no fixed order"
    if not (loss <= tolerance and all(share <= STATE_TOLERANCE for share in shares)):
        raise RunError(f"resume is NOT exact: more than the order of additions explains ({rule})")
    print(f"resume is proved: equal {'bit for bit' if equal else f'but for the last digits ({rule})'}")


def compare(unbroken: Path, resumed: Path, num_steps: int) -> tuple[float, int, list[float]]:
    """Compare two runs of 2·`num_steps` steps; the resumed one has its checkpoint of `num_steps` as well.

    Returns the largest difference of two losses, the count of unequal numbers in weights and optimizer, and for each of
    these two the norm of the difference, as a share of what the last steps changed.
    """
    lines = [[line for line in step_metrics.read(run) if "loss" in line] for run in (unbroken, resumed)]
    losses = [{line["step"]: line["loss"] for line in of_run if line["step"] > num_steps} for of_run in lines]
    if not losses[0].keys() == losses[1].keys() == set(range(num_steps + 1, 2 * num_steps + 1)):
        raise RunError("a step was skipped or not recorded in one of the two runs; its messages above say why")
    half, *ends = (checkpoint.folder_of(run, n * num_steps) for run, n in ((resumed, 1), (unbroken, 2), (resumed, 2)))
    unequal, shares = 0, []
    for read in (checkpoint.read_weights, checkpoint.read_moments):
        before, first, second = read(half), read(ends[0]), read(ends[1])
        unequal += sum(int((first[name] != second[name]).sum()) for name in first)
        apart = sum(float((first[name].double() - second[name].double()).square().sum()) for name in first)
        moved = sum(float((first[name].double() - before[name].double()).square().sum()) for name in first)
        shares.append((apart / moved) ** 0.5 if moved else float("inf" if apart else 0))
        del before, first, second
    return max(abs(losses[0][step] - losses[1][step]) for step in losses[0]), unequal, shares
