"""Proof that a run of this configuration, on this data and machine, resumes as if it had never been stopped.

In a folder of its own, which is deleted afterwards, it trains 2·N steps unbroken; then N steps, which are saved, and in
new processes from that checkpoint N more. Losses, weights and optimizer state must be those of the unbroken run: bit
for bit where one process computes on a CPU. Elsewhere the order of additions is not fixed (a GPU adds in the order in
which its blocks end, several processes in that of their messages), so that even two unbroken runs differ in the last
digits: there `LOSS_TOLERANCE` and `STATE_TOLERANCE` decide.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from zerokara import checkpoint, file_lock
from zerokara.durable import make_folders
from zerokara.errors import Fault, RunError, UserError
from zerokara.progress import bytes_text
from zerokara.training.monitoring import metrics
from zerokara.training.planning import run_folder
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan
from zerokara.training.spawning import spawn

LOCK_NAME = "proof.lock"
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Nats a token, where bits cannot be asked for: ten times the difference that sharing the work out otherwise makes."""
STATE_TOLERANCE = 0.1
"""Norm of the difference, as a share of what the last N steps changed. Adam turns the sign of a nearly zero gradient
into a whole step, so that last digits grow; a lost state, or other data, gives about 1."""
_QUIET = {
    "plots": False,
    "tensorboard": False,
    "wandb": "off",
    "log_interval": 1,
    "eval_interval": 10**9,
    "save_interval": 10**9,
    "keep_last": 10,
    "keep_every": 0,
    "keep_best": False,
    "sample_prompts": (),
    "max_hours": "auto",
}
"""The proof trains, saves, and does nothing else."""


@dataclass(frozen=True)
class Difference:
    """Difference between the resumed run and the unbroken one."""

    losses: list[tuple[int, float, float]]
    """For each step after the first N: its number, and the loss unbroken and resumed."""
    numbers: dict[str, int]
    """Count of numbers in `weights` and in `optimizer`."""
    unequal: dict[str, int]
    """Count of those that differ in any bit."""
    shares: dict[str, float]
    """Norm of the difference, as a share of what the last N steps changed."""

    @property
    def loss(self) -> float:
        """The largest difference between two losses."""
        return max(abs(unbroken - resumed) for _, unbroken, resumed in self.losses)


def prove(plan: RunPlan, num_steps: int) -> None:
    """Prove that a run of `plan` resumes; print the comparison. The run's own folder is not touched.

    Raises:
        UserError: the run is too short.
        RunError: the disk is too full, a training ended early, or the proof failed.
    """
    import torch

    if 2 * num_steps > plan.schedule.num_steps:
        rule = f"a proof of 2 × {num_steps} steps needs a run of as many; this one has {plan.schedule.num_steps}"
        remedy = f"at most --verify-resume {plan.schedule.num_steps // 2} fits"
        raise UserError(Fault(where="--verify-resume", value=num_steps, rule=rule, remedy=remedy))
    bitwise = plan.num_processes == 1 and not torch.cuda.is_available()
    folder = plan.run_dir.with_name(plan.run_dir.name + ".verify-resume")
    print(f"proving resume in {folder}, which is deleted afterwards: 2 × {num_steps} steps unbroken, {num_steps} and")
    print(f"{num_steps} in new processes; no validation, no plots; {plan.run_dir} is not touched", flush=True)
    with _scratch(folder, 3 * plan.checkpoint_bytes):
        for name, last in (("unbroken", 2 * num_steps), ("resumed", num_steps), ("resumed", 2 * num_steps)):
            print(f"{name}, to step {last}:", flush=True)
            _train(plan, folder / name, last)
        difference = compare(folder / "unbroken", folder / "resumed", num_steps)
    for line in table(difference):
        print(f"  {line}")
    if difference.loss == 0 and not any(difference.unequal.values()):
        print("resume is proved: equal bit for bit")
        return
    if bitwise:
        raise RunError("resume is NOT exact: one process on a CPU must give equal bits, and the table shows others")
    loss_tolerance = LOSS_TOLERANCE[plan.config.precision]
    rule = f"losses within {loss_tolerance:g}, state within {STATE_TOLERANCE:g}"
    why = "several processes or a GPU add up in no fixed order"
    if not (difference.loss <= loss_tolerance and max(difference.shares.values()) <= STATE_TOLERANCE):
        raise RunError(f"resume is NOT exact: more than the order of additions explains ({rule}; {why})")
    print(f"resume is proved: equal but for the last digits ({rule}; {why})")


def compare(unbroken: Path, resumed: Path, num_steps: int) -> Difference:
    """The difference of two runs of 2·`num_steps` steps; the resumed one has its checkpoint of `num_steps` as well."""
    losses = [
        {line["step"]: line["loss"] for line in metrics.read(run) if "loss" in line} for run in (unbroken, resumed)
    ]
    steps = range(num_steps + 1, 2 * num_steps + 1)
    if any(step not in of_run for of_run in losses for step in steps):
        raise RunError("a step was skipped or not recorded in one of the two runs; its messages above say why")
    ends = [checkpoint.folder_of(run, 2 * num_steps) for run in (unbroken, resumed)]
    numbers, unequal, shares = {}, {}, {}
    for part, read in (("weights", checkpoint.read_weights), ("optimizer", checkpoint.read_moments)):
        before, first, second = read(checkpoint.folder_of(resumed, num_steps)), read(ends[0]), read(ends[1])
        if first.keys() != second.keys():
            raise RunError(f"the two runs saved {part} of other names: {sorted(first.keys() ^ second.keys())[:5]}")
        numbers[part] = sum(tensor.numel() for tensor in first.values())
        unequal[part] = sum(int((first[name] != second[name]).sum()) for name in first)
        apart = sum(float((first[name].double() - second[name].double()).square().sum()) for name in first)
        moved = sum(float((first[name].double() - before[name].double()).square().sum()) for name in first)
        shares[part] = (apart / moved) ** 0.5 if moved else float("nan" if apart else 0)
        del before, first, second
    states = [checkpoint.read_state(end) for end in ends]
    if (states[0].samples, states[0].tokens) != (states[1].samples, states[1].tokens):
        raise RunError(f"the two runs stand at other data: {states[0].samples} and {states[1].samples} sequences")
    return Difference([(step, losses[0][step], losses[1][step]) for step in steps], numbers, unequal, shares)


def table(difference: Difference) -> list[str]:
    """The comparison, for people."""
    lines = [f"{'step':>9}  {'unbroken':>12}  {'resumed':>12}  difference"]
    for step, unbroken, resumed in difference.losses:
        lines.append(f"{step:>9}  {unbroken:>12.8f}  {resumed:>12.8f}  {abs(unbroken - resumed):.1e}")
    for part, number in difference.numbers.items():
        unequal, share = difference.unequal[part], difference.shares[part]
        finding = f"{unequal:,} differ, by {share:.1e} of what the steps changed" if unequal else "equal bit for bit"
        lines.append(f"{part:>9}  {number:,} numbers, {finding}")
    return lines


@contextmanager
def _scratch(folder: Path, needed: int) -> Iterator[None]:
    """A folder of the proof's own. What a proof that was killed left there is deleted, and nobody else's files are."""
    lock = folder / LOCK_NAME
    if folder.exists() and not lock.exists() and any(folder.iterdir()):
        rule = "is where a proof works, and holds files that no proof left there"
        raise UserError(Fault(str(folder), rule, remedy="give it another name"))
    make_folders(folder)
    with file_lock.held(lock) as is_ours:
        if not is_ours:
            raise UserError(
                Fault(str(folder), f"{file_lock.read_holder(lock) or 'another command'} is proving resume here")
            )
        for left in folder.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
            elif left != lock:
                left.unlink()
        with _deleted_afterwards(folder, needed):
            yield


@contextmanager
def _deleted_afterwards(folder: Path, needed: int) -> Iterator[None]:
    try:
        if (free := shutil.disk_usage(folder).free) < needed:
            raise RunError(
                f"{folder}: a proof needs {bytes_text(needed)} for its checkpoints, {bytes_text(free)} are free"
            )
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _train(plan: RunPlan, run_dir: Path, last_step: int) -> None:
    settings = plan.config.model_copy(update={**_QUIET, "output_model_dir": str(run_dir)})
    settings._origin = plan.config._origin
    plan = replace(plan, config=settings, given=settings)
    run_folder.claim(plan)
    if code := spawn(plan, "prove", str(last_step), path=run_dir / PLAN_NAME):
        raise RunError(f"the training ended with exit code {code}, so nothing is proved; the messages above say why")
