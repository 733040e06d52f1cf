"""The launching process of a run: it plans, checks, shows, holds the run folder, and starts the training processes.

What can be wrong is looked for first, the cheapest first: before torch is loaded, then before anything is written. The
training processes get the plan as a file; this one waits for them, and trains nothing itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from zerokara import checkpoint
from zerokara.config.pretrain_config import RunConfig
from zerokara.errors import RunError, Stopped, UserError
from zerokara.progress import count_text, opening, summary
from zerokara.training import micro_batch
from zerokara.training.monitoring import metrics
from zerokara.training.nodes.machines import Machines
from zerokara.training.planning import preflight, processors, run_folder, run_lock, run_plan, schedule
from zerokara.training.planning.consumption import table_lines
from zerokara.training.planning.run_folder import EarlierRun
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan, Task
from zerokara.training.spawning import Commands, processes_text, spawn

TRIAL_SECONDS = 3600.0
"""How long the other machines wait for the first one's trials of the micro batch."""


def train(config: RunConfig, task: Task, commands: Commands, machines: Machines, redo: bool, dry_run: bool) -> None:
    """Plan a run, show the plan, and train to the end, here or on several machines; a dry run only tries a few steps.

    Raises:
        UserError: the settings, the data or the run folder do not fit; the limits leave no time, the disk or the memory
            no room; or a source would be read too often.
        RunError: the training failed.
        Stopped, KeyboardInterrupt: the run was asked to stop before its end.
    """
    with contextlib.ExitStack() as held:
        if machines.is_first:  # where another machine shares the first one's folder, that command is at work there
            held.enter_context(run_lock.held(config))
        earlier = run_folder.look(config)
        resumed = None if redo else earlier
        plan = run_plan.make_plan(config, kept=resumed.requested if resumed else None, nodes=machines.number, task=task)
        lines = run_folder.check_redo(plan, earlier) if earlier and redo else []
        changes = run_folder.check_same_run(plan, resumed) if resumed else []
        if resumed and resumed.is_complete(plan.schedule.num_steps):
            changed = f" (changed since: {', '.join(changes)})" if changes else ""
            print(
                f"{commands.title}: {plan.run_dir} is complete already; --redo sets it aside and trains again{changed}"
            )
            print(f"next: {commands.convert}")
            return
        if faults := list(preflight.faults(plan, resumed, commands.convert)):
            raise UserError(faults)
        plan = on_this_machine(plan, resumed)
        check_fits(plan, starts=not (resumed and resumed.steps))
        changes += changed_choices(plan, resumed) if resumed else []
        show(plan, commands.title, [*lines, *(f"changed since this run's last start: {each}" for each in changes)])
        if dry_run:
            if machines.are_several:
                print(f"  this machine alone is tried: start without --dry-run to compare all {machines.number}")
            micro_batch.try_steps(plan)
            print("dry run: everything is in order; nothing was written in the run folder")
            return
        claims = True
        if machines.are_several:
            # Before the first machine knows the micro batch, it may have tried several, and compiled for each.
            meeting = held.enter_context(machines.met())
            if machines.is_first:
                meeting.tell("micro_batch", micro_batch.chosen(plan, resumed).resolved.micro_batch)
            plan = plan.with_settings(micro_batch_size=int(meeting.hear_from_first("micro_batch", TRIAL_SECONDS)))
            plan = machines.agreed(plan, plan.devices.text(plan.processes_per_node), plan.memory.device)
            claims = machines.claims(plan.run_dir)
            if claims and not machines.is_first:
                held.enter_context(run_lock.held(config))
        else:
            plan = micro_batch.chosen(plan, resumed)
        if claims:
            if redo and earlier:  # the last thing before the start: a refusal above has cost nothing
                run_folder.set_aside(plan.run_dir)
            run_folder.claim(plan)
        if machines.are_several:
            machines.wait_until_all("claimed")
        print(f"starting {processes_text(plan)}; importing torch takes seconds", flush=True)
        try:
            code = spawn(plan, "train", machines=machines, path=plan.run_dir / PLAN_NAME if claims else None)
        except KeyboardInterrupt:
            raise Stopped(f"to resume: {commands.resume}") from None
        newest = _newest_at_end(plan, code, commands)
        if not machines.is_first:
            print(f"trained; the first machine, {machines.endpoint}, writes the record of the run")
            return
        of_task = task.finish(plan, commands, newest)
        rows = run_folder.summary_rows(run_folder.record(plan, newest), newest, plan.run_dir, of_task)
        summary(f"trained {plan.run_dir}", rows, commands.convert)


def on_this_machine(plan: RunPlan, earlier: EarlierRun | None = None) -> RunPlan:
    """Resolve devices, precision, processes and micro batch. From here on torch may be loaded.

    On a GPU a micro batch that no earlier start has chosen is a first guess: see `micro_batch.chosen`.

    Raises:
        UserError: there are too few GPUs or cores.
    """
    config, devices = plan.requested, processors.devices()
    micro = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    plan = replace(plan, devices=devices).with_settings(precision=devices.precision(config), micro_batch_size=micro)
    micro = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    # On a CPU as many as share the batch and fit, at last 1.
    for number in devices.process_counts(config, plan.schedule.batch_tokens // plan.nodes):
        shares_batch = plan.resolved.global_batch % (plan.nodes * number * micro) == 0
        if shares_batch and replace(plan, num_processes=plan.nodes * number).memory.fits:
            break
    plan = plan.on_processes(plan.nodes * number)
    if config.micro_batch_size == "auto":
        plan = plan.with_settings(micro_batch_size=micro_batch.kept(plan, earlier) or micro_batch.first_choice(plan))
    return plan


def check_fits(plan: RunPlan, starts: bool) -> None:
    """Check that a run fits into this machine's memory at all, and, where it `starts`, the model it starts from.

    Raises:
        UserError: it cannot; there is no such model, or none that this run can start from. For that torch is loaded.
    """
    if plan.resolved.init_from and starts:
        from zerokara.huggingface import from_hf

        source, extends_vocabulary = Path(plan.resolved.init_from), plan.resolved.resize_vocabulary == "mean"
        from_hf.check_source(source, plan.shape, plan.encoder, extends_vocabulary, plan.resolved.fault)
    if faults := list(preflight.memory_faults(plan.memory_alone, plan.requested)):
        raise UserError(faults)


def changed_choices(plan: RunPlan, earlier: EarlierRun) -> Iterator[str]:
    """A message for the micro batch of `auto` and for the learning rate where they are not those of the last start.

    A run that is made longer has a longer schedule: its learning rate, which had fallen, rises again.
    """
    before, now = earlier.plan.get("resolved", {}).get("micro_batch_size"), plan.resolved.micro_batch_size
    if plan.requested.micro_batch_size == "auto" and before not in (None, now):
        yield f"micro_batch_size: auto was {before}, is now {now}: the same sums in another order"
    reached = max(earlier.steps, default=0)
    logged = [line for line in metrics.read(plan.run_dir) if "learning_rate" in line and line["step"] <= reached]
    if logged:
        step, rate = logged[-1]["step"], logged[-1]["learning_rate"]
        planned = plan.schedule.learning_rate(step)
        if not math.isclose(planned, rate, rel_tol=1e-6):
            verb = "rises" if planned > rate else "falls"
            yield f"learning rate: {verb} from {rate:.2e} at step {step:,} to {planned:.2e}, as the new schedule has it"


def show(plan: RunPlan, title: str, lines: Sequence[str]) -> None:
    """Print a plan, and further lines below it."""
    opening(f"{title}: {plan.data.train_prefix} → {plan.run_dir}")
    device = ("device", plan.devices.text(plan.processes_per_node))
    for name, value in [device, *preflight.plan_rows(plan), *plan.memory.rows()]:
        print(f"  {name:<12}  {value}")
    for line in [*table_lines(plan.data.reading, plan.schedule, plan.consumption), *lines]:
        print(f"  {line}")


def _newest_at_end(plan: RunPlan, code: int, commands: Commands) -> Path:
    """The last checkpoint of a run whose processes have ended with `code`."""
    run_dir = plan.run_dir
    if code:
        from_where = f" from the newest checkpoint in {run_dir}" if checkpoint.all_steps(run_dir) else ""
        rule = f"training ended with exit code {code}; the messages above say why. To resume{from_where}"
        raise RunError(f"{rule}: {commands.resume}")
    newest = checkpoint.newest_complete(run_dir)
    state = checkpoint.read_state(newest) if newest else None
    if newest and state and state.step >= plan.schedule.num_steps:
        return newest
    # A limit or the file STOP ended the run early; what comes after this step must not run.
    if state and schedule.hours_are_used_up(plan.requested, state.seconds):
        raise Stopped(f"max_hours is reached: {schedule.RAISE}; or take what is there: {commands.convert}")
    raise Stopped(f"to resume: {commands.resume}")


def evaluate(config: RunConfig, task: Task, title: str, name: str) -> None:
    """Evaluate the checkpoint that `name` means (`run_folder.find_checkpoint`) in training processes.

    Raises:
        UserError: there is no such checkpoint, or it is another run's.
        RunError: the evaluation failed.
    """
    earlier = run_folder.look(config)
    plan = run_plan.make_plan(config, kept=earlier.requested if earlier else None, task=task)
    if earlier:
        run_folder.check_same_run(plan, earlier)
    folder = run_folder.find_checkpoint(plan, name)
    plan = on_this_machine(plan, earlier)
    tokens = count_text(plan.data.num_valid_tokens)
    opening(f"{title}, evaluate: {folder} on {tokens} tokens, {processes_text(plan)}")
    print(f"  {plan.devices.text(plan.num_processes)}")
    if code := spawn(plan, "evaluate", str(folder)):
        raise RunError(f"the evaluation ended with exit code {code}; the messages above say why")
