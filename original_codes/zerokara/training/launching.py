"""The launching process of a run: what is checked before torch is loaded, the plan on this machine, trial and start.

It checks everything that can be wrong, the cheapest first; shows the plan; holds the run folder; starts the training
processes and waits for them. It trains nothing itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerokara import checkpoint, resources
from zerokara.errors import RunError, Stopped, UserError
from zerokara.progress import count_text, opening
from zerokara.training.micro_batch import first_choice, keep_choice, kept_choice, try_steps
from zerokara.training.monitoring import metrics
from zerokara.training.nodes.machines import Machines
from zerokara.training.planning import preflight, processors, run_folder, run_lock, run_plan, schedule
from zerokara.training.planning.consumption import table_lines
from zerokara.training.planning.memory import MemoryForecast
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan
from zerokara.training.spawning import Commands, processes_text, spawn

TRIAL_SECONDS = 3600.0
"""How long the other machines wait for the first one's trials of the micro batch."""


@dataclass(frozen=True)
class LocalPlan:
    """A plan with every `auto` resolved on this machine."""

    plan: RunPlan
    memory_forecast: MemoryForecast
    """The memory that the run needs, against what is free now."""
    keeps_micro_batch: bool = True
    """False where `micro_batch_size: auto` is chosen anew."""
    changes: tuple[str, ...] = ()
    """A message for each choice that differs from the run's last start."""


def on_this_machine(plan: RunPlan, redo: bool = False) -> LocalPlan:
    """Resolve precision, processes and micro batch. From here on torch is loaded.

    Raises:
        UserError: there are too few GPUs or cores.
    """
    config, precision, gpu_bytes = plan.requested, processors.precision(plan.requested), processors.gpu_bytes()
    number, counts = processors.num_processes(config), []
    if config.num_processes == "auto" and config.tensor_parallel_size == 1 and gpu_bytes is None:
        counts = processors.process_counts(plan.schedule.batch_tokens // plan.nodes)
    micro_batch = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    resolved = run_plan.with_precision(plan, precision)
    for number in counts:  # on a CPU as many as share the batch and fit, at last 1
        if plan.resolved.global_batch % (plan.nodes * number * micro_batch) == 0:
            tried = replace(resolved, num_processes=plan.nodes * number)
            if tried.memory_forecast(None).fits:
                break
    plan = run_plan.on_processes(resolved, plan.nodes * number)
    forecast = plan.memory_forecast(gpu_bytes)
    if config.micro_batch_size != "auto":
        return LocalPlan(plan, forecast)
    before, holds = (None, False) if redo else kept_choice(plan.run_dir, forecast)
    size = before if before is not None and holds else first_choice(forecast)
    changes: tuple[str, ...] = ()
    if before not in (None, size):
        changes = (f"micro_batch_size: auto was {before}, is now {size}: the same sums in another order",)
    plan, forecast = run_plan.with_micro_batch(plan, size), replace(forecast, micro_batch_size=size)
    return LocalPlan(plan, forecast, holds, changes)


def check_init_from(plan: RunPlan) -> None:
    """Check the model to start from, where there is one; for it torch is loaded.

    Raises:
        UserError: it is not there, or not a model that this run can start from.
    """
    if plan.resolved.init_from:
        from zerokara.huggingface import from_hf

        extends_vocabulary = plan.resolved.resize_vocabulary == "mean"
        from_hf.check_source(
            Path(plan.resolved.init_from), plan.shape, plan.encoder, extends_vocabulary, plan.resolved.fault
        )


def check_memory(local: LocalPlan) -> None:
    """Check that the run may fit into this machine's memory at all.

    Raises:
        UserError: it cannot.
    """
    installed = resources.total_memory(local.plan.processes_per_node)
    if faults := list(
        preflight.memory_faults(replace(local.memory_forecast, main_bytes=installed), local.plan.requested)
    ):
        raise UserError(faults)


def train(
    plan: RunPlan, commands: Commands, machines: Machines, redo: bool, dry_run: bool, changes: Sequence[str]
) -> tuple[RunPlan, Path] | None:
    """Show the plan, try it where that is asked for or needed, and train to the end, here or on several machines.

    `changes` are those that `run_folder.check_same_run` found. Returns the plan that was trained and its newest
    checkpoint, or None after a dry run.

    Raises:
        UserError: the limits leave no time, the disk or the memory no room, or a source would be read too often.
        RunError: the training failed.
        Stopped, KeyboardInterrupt: the run was asked to stop before its end.
    """
    if faults := [
        *preflight.hours_faults(
            plan.requested, plan.checkpoint_bytes, 0 if redo else trained_seconds(plan.run_dir), commands.convert
        ),
        *preflight.disk_faults(plan, beside_old=redo),
        *preflight.epochs_faults(plan.requested, plan.consumption.sources),
        *preflight.id_faults(plan),
    ]:
        raise UserError(faults)
    lines = run_folder.check_redo(plan) if redo else []
    with contextlib.ExitStack() as held:
        if machines.is_first and not dry_run:
            held.enter_context(run_lock.held(plan.requested))
        if redo or not checkpoint.all_steps(plan.run_dir):
            check_init_from(plan)
        local = on_this_machine(plan, redo)
        check_memory(local)
        changes = [*changes, *local.changes, *([] if redo else learning_rate_changes(plan))]
        lines += [f"changed since this run's last start: {change}" for change in changes]
        show(local, commands.title, lines)
        if dry_run:
            if machines.are_several:
                print(f"  this machine alone is tried: start without --dry-run to compare all {machines.number}")
            try_steps(_on_one_machine(local.plan), local.memory_forecast)
            return None
        plan, claims = local.plan, True
        if machines.are_several:
            # Before the first machine knows the micro batch, it may have tried several, and compiled for each.
            meeting = held.enter_context(machines.met())
            if machines.is_first:
                meeting.tell("micro_batch", _with_micro_batch(local).resolved.micro_batch)
            plan = run_plan.with_micro_batch(plan, int(meeting.hear_from_first("micro_batch", TRIAL_SECONDS)))
            device = local.memory_forecast.device
            plan = machines.agreed(plan, processors.device_rows(plan.processes_per_node)[0][1], device)
            claims = machines.claims(plan.run_dir)
            if claims and not machines.is_first:
                held.enter_context(run_lock.held(plan.requested))
        else:
            plan = _with_micro_batch(local)
        if claims and redo:
            run_folder.set_aside(plan.run_dir)  # the last thing before the start: a refusal above has cost nothing
        if claims:
            run_folder.claim(plan)
            if plan.requested.micro_batch_size == "auto":
                keep_choice(plan.run_dir, local.memory_forecast, plan.resolved.micro_batch)
        if machines.are_several:
            machines.wait_until_all("claimed")
        return plan, _to_the_end(plan, commands, machines, plan.run_dir / PLAN_NAME if claims else None)


def show(local: LocalPlan, title: str, lines: Sequence[str]) -> None:
    """Print a plan, and further lines below it."""
    plan = local.plan
    opening(f"{title}: {plan.data.train_prefix} → {plan.run_dir}")
    devices = processors.device_rows(plan.processes_per_node)
    for name, value in [*devices, *preflight.plan_rows(plan), *local.memory_forecast.rows()]:
        print(f"  {name:<12}  {value}")
    for line in [*table_lines(plan.resolved, plan.schedule, plan.consumption), *lines]:
        print(f"  {line}")


def _on_one_machine(plan: RunPlan) -> RunPlan:
    """Return the plan for this machine alone, for what is tried here: it holds at least as much as among several."""
    return run_plan.on_processes(plan, plan.processes_per_node, 1)


def _with_micro_batch(local: LocalPlan) -> RunPlan:
    """Return the plan with its final micro batch, which a GPU is asked for."""
    if local.keeps_micro_batch or local.memory_forecast.device == "cpu":
        return local.plan
    tried, _ = try_steps(_on_one_machine(local.plan), local.memory_forecast)
    return run_plan.with_micro_batch(local.plan, tried.resolved.micro_batch)


def _to_the_end(plan: RunPlan, commands: Commands, machines: Machines, path: Path | None) -> Path:
    """Train, and return the last checkpoint."""
    print(f"starting {processes_text(plan)}; importing torch takes seconds", flush=True)
    try:
        code = spawn(plan, "train", machines=machines, path=path)
    except KeyboardInterrupt:
        raise Stopped(f"to resume: {commands.resume}") from None
    if code:
        from_where = f" from the newest checkpoint in {plan.run_dir}" if checkpoint.all_steps(plan.run_dir) else ""
        reached = max((line["step"] for line in metrics.read(plan.run_dir)), default=0)
        after = f" after step {reached:,}" if reached else ""
        raise RunError(
            f"training ended{after} with exit code {code}; the messages above say why. To resume{from_where}: "
            f"{commands.resume}"
        )
    newest = checkpoint.newest_complete(plan.run_dir)
    if newest is not None and checkpoint.read_state(newest).step >= plan.schedule.num_steps:
        return newest
    # A limit or the file STOP ended the run early; what comes after this step must not run.
    if schedule.hours_are_used_up(plan.requested, trained_seconds(plan.run_dir)):
        raise Stopped(f"max_hours is reached: {schedule.RAISE}; or take what is there: {commands.convert}")
    raise Stopped(f"to resume: {commands.resume}")


def evaluate(plan: RunPlan, commands: Commands, name: str) -> None:
    """Evaluate the checkpoint that `name` means (`run_folder.find_checkpoint`) in training processes.

    Raises:
        UserError: there is no such checkpoint, or it is another run's.
        RunError: the evaluation failed.
    """
    run_folder.check_same_run(plan)
    folder = run_folder.find_checkpoint(plan, name)
    plan = on_this_machine(plan).plan
    tokens = count_text(plan.data.num_valid_tokens)
    opening(f"{commands.title}, evaluate: {folder} on {tokens} tokens, {processes_text(plan)}")
    for _, value in processors.device_rows(plan.num_processes):
        print(f"  {value}")
    if code := spawn(plan, "evaluate", str(folder)):
        raise RunError(f"the evaluation ended with exit code {code}; the messages above say why")


def learning_rate_changes(plan: RunPlan) -> Iterator[str]:
    """A message where this start's schedule has another learning rate than the run had at its newest checkpoint.

    A run that is made longer has a longer schedule: its learning rate, which had fallen, rises again.
    """
    reached = max(checkpoint.all_steps(plan.run_dir), default=0)
    lines = [line for line in metrics.read(plan.run_dir) if "learning_rate" in line and line["step"] <= reached]
    if lines:
        step, before = lines[-1]["step"], lines[-1]["learning_rate"]
        now = plan.schedule.learning_rate(step)
        if not math.isclose(now, before, rel_tol=1e-6):
            verb = "rises" if now > before else "falls"
            yield f"learning rate: {verb} from {before:.2e} at step {step:,} to {now:.2e}, as the new schedule has it"


def trained_seconds(run_dir: Path) -> float:
    """Return how long a run has been trained, as its newest checkpoint says."""
    folders = (checkpoint.folder_of(run_dir, step) for step in reversed(checkpoint.all_steps(run_dir)))
    newest = next((folder for folder in folders if (folder / checkpoint.STATE_NAME).exists()), None)
    return checkpoint.read_state(newest).seconds if newest else 0.0
