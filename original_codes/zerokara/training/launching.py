"""The launching process of a run: it plans, checks, locks the run folder, and starts the training processes.

Checks come first, the cheapest first: before torch is loaded, then before anything is written. The training processes
get the plan as a file, and RANK, LOCAL_RANK and WORLD_SIZE from torchrun's agent, which starts and watches them
(`nodes.agent`). This process waits for them, and trains nothing itself.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerokara import checkpoint, resources
from zerokara.config.pretrain_config import RunConfig
from zerokara.config.writing import overrides
from zerokara.errors import Fault, RunError, Stopped, UserError
from zerokara.progress import count_text, log, plural, seconds_text, summary
from zerokara.training import trials
from zerokara.training.nodes.machines import Machines
from zerokara.training.planning import plan_table, run_folder, run_plan, schedule
from zerokara.training.planning.run_folder import EarlierRun
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan, RunTask
from zerokara.training.planning.schedule import Schedule, extent_of, table_lines
from zerokara.training.spawning import spawn

TRIAL_SECONDS = 3600.0
"""Wait of the other machines for the first one's trials of the micro batch."""


@dataclass(frozen=True)
class Commands:
    """Commands that follow the step: one resumes the run, one converts its newest checkpoint."""

    resume: str
    convert: str


def train(
    config: RunConfig, task: RunTask, commands: Commands, machines: Machines, redo: bool, dry_run: bool, verbose: bool
) -> None:
    """Plan a run, show the plan, and train to the end, here or on several machines; a dry run only tries a few steps.

    Raises:
        UserError: the settings, the data or the run folder do not fit; the limits leave no time, the disk or the memory
            no room; or a source would be read too often.
        RunError: the training failed.
        Stopped, KeyboardInterrupt: the run was asked to stop before its end.
    """
    with contextlib.ExitStack() as stack:
        if machines.is_first:  # where another machine shares the first one's folder, that command is at work there
            stack.enter_context(run_folder.command_lock(config))
        earlier = run_folder.look(config)
        resumed = None if redo else earlier
        kept = resumed.plan if resumed else None
        plan = run_plan.make_plan(config, kept=kept, nodes=machines.number, task=task)
        lines = run_folder.check_redo(plan, earlier) if earlier and redo else []
        changes = run_folder.check_same_run(plan, resumed) if resumed else []
        if resumed and run_folder.is_complete(plan, resumed, changes):
            print(f"{task.title}: {plan.run_dir} is complete already; --redo sets it aside and trains again")
            print(f"next: {commands.convert}")
            return
        changes += course_changes(plan, resumed, commands.resume) if resumed else []
        trained_seconds = resumed.state.seconds if resumed and resumed.state else 0.0
        if faults := [
            *schedule.hours_faults(plan.requested, plan.checkpoint_bytes, trained_seconds, commands.convert),
            *schedule.epochs_faults(plan.requested, plan.consumption.sources),
            *plan.faults(len(resumed.steps) if resumed else 0),
        ]:
            raise UserError(faults)
        plan = trials.on_this_machine(plan, resumed)
        lines += check_fits(plan, starts=not (resumed and resumed.steps))
        show(plan, [*lines, *(f"changed since this run's last start: {each}" for each in changes)], verbose)
        if dry_run:
            if machines.number > 1:
                print(f"  this machine alone is tried: start without --dry-run to compare all {machines.number}")
            seconds, steps = trials.try_steps(plan)[1].seconds_per_step, plan.schedule.num_steps
            print(f"all {steps:,} steps would take {seconds_text(steps * seconds)}, validations and saves not counted")
            print("dry run: everything is in order; nothing was written in the run folder")
            return
        owns_run_dir, meeting = True, None
        if machines.number > 1:
            from zerokara.training.nodes.meeting import check_consistent, meet

            # Before the first machine knows the micro batch, it may have tried several, and compiled for each.
            meeting = stack.enter_context(meet(machines))
            if machines.is_first:
                meeting.publish("micro_batch", trials.with_micro_batch(plan, resumed).resolved.micro_batch)
            plan = plan.with_settings(micro_batch_size=meeting.wait_for("micro_batch", seconds=TRIAL_SECONDS))
            plan = check_consistent(meeting, plan)
            owns_run_dir = meeting.owns_run_dir(plan.run_dir)
            if owns_run_dir and not machines.is_first:
                stack.enter_context(run_folder.command_lock(config))
        else:
            plan = trials.with_micro_batch(trials.with_processes(plan, resumed), resumed)
        if owns_run_dir:
            if redo and earlier:  # the last thing before the start: a refusal above has cost nothing
                run_folder.set_aside(plan.run_dir)
            run_folder.claim(plan, list(plan_table.rows(plan, in_full=True)))
        if meeting:
            meeting.gather("claimed")
        count = plural(plan.num_processes, "process", "processes")
        print(f"starting {count}; importing torch takes seconds", flush=True)
        try:
            code = spawn(plan, "train", meeting=meeting, path=plan.run_dir / PLAN_NAME if owns_run_dir else None)
        except KeyboardInterrupt:
            raise Stopped(f"to resume: {commands.resume}") from None
        newest = _newest_at_end(plan, code, commands)
        if not machines.is_first:
            print(f"trained; the first machine, {machines.endpoint}, writes the record of the run")
            return
        task_rows = task.finish(plan, commands, newest)
        rows = run_folder.summary_rows(run_folder.record(plan, newest), newest, plan.run_dir, task_rows)
        summary(f"trained {plan.run_dir}", rows, commands.convert)


def check_fits(plan: RunPlan, starts: bool) -> list[str]:
    """Check that a run can fit into this machine's memory, and, where it `starts`, the model it starts from.

    Returns a line for the plan about that model's new vocabulary, if it gets one.

    Raises:
        UserError: it cannot; there is no such model, or none that this run can start from. For that torch is loaded.
    """
    lines: list[str] = []
    if plan.resolved.init_from and starts:
        from zerokara.huggingface import from_hf

        source, config = Path(plan.resolved.init_from), plan.resolved
        vocabulary = from_hf.check_source(source, plan.shape, plan.encoder, config.new_embeddings, config.fault)
        lines += [f"new_embeddings: {vocabulary.row}"] if vocabulary else []
    alone = replace(plan.memory, main_bytes=resources.total_memory(plan.processes_per_node))
    if faults := list(alone.faults(plan.requested)):  # with other programs, it is noted in the plan
        raise UserError(faults)
    return lines


def course_changes(plan: RunPlan, earlier: EarlierRun, resume: str) -> list[str]:
    """Return in what the rest of a run differs from the last start's plan; `resume` is the command of this start.

    Raises:
        UserError: it does so by settings that this command has not typed, and nobody has changed in the file since;
            with the command that goes on as before, and the one that changes the run.
    """
    config, origin = plan.requested, plan.requested._origin
    last, was = earlier.plan["origin"], earlier.plan["requested"]
    before = {key: value for key, value in was.items() if key in run_plan.LENGTH_AND_RATE}
    batch = max(1, was["global_batch_size"] * was["seq_len"] // config.seq_len)  # sequences may grow
    course = config.model_copy(update={**before, "global_batch_size": batch})
    step, extent = earlier.state.step if earlier.state else 0, extent_of(plan.data.reading)
    changes = list(schedule.differences(Schedule.from_config(course, *extent), plan.schedule, step))
    # A file that was changed has been typed; what another one says was not: --config may have been forgotten.
    values, tried = last.get("values", origin.values), {*last["overridden"]}
    in_file = {key for key in before if values.get(key) != origin.values.get(key)}
    forgotten = tried - in_file if last["path"] == origin.path else tried | in_file
    now = config.model_dump(mode="json")
    lost = [key for key in was if key in forgotten and not config.typed(key) and was[key] != now.get(key)]
    if changes and not before.keys().isdisjoint(lost):
        now |= dict.fromkeys(plan.reasons, "auto")
        was_typed, new = (
            " ".join(f"--set {shlex.quote(each)}" for each in overrides(settings))
            for settings in ({key: was[key] for key in lost}, {key: now[key] for key in lost if key in before})
        )
        rule = f"would go on with {'; '.join(changes)}: the last start had {was_typed}, this one has not"
        remedy = f"to go on as before:\n  {resume} {was_typed}\nto change the run:\n  {resume} {new}"
        raise UserError(Fault(str(plan.run_dir), rule, remedy=remedy))
    return changes


def show(plan: RunPlan, lines: Sequence[str], verbose: bool) -> None:
    """Print a plan, where `verbose` in full, and further lines below it."""
    log(f"{plan.task.title}: {plan.data.train_prefix} → {plan.run_dir}")
    for name, value in plan_table.rows(plan, verbose):
        print(f"  {name:<12}  {value}")
    is_mixed = plan.consumption.stages or plan.consumption.sources[1:]
    table = table_lines(plan.data.reading, plan.schedule, plan.consumption) if is_mixed or verbose else ()
    for line in [*table, *lines]:
        print(f"  {line}")


def _newest_at_end(plan: RunPlan, code: int, commands: Commands) -> Path:
    """Return the last checkpoint of a run whose processes have ended with `code`."""
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


def evaluate(config: RunConfig, task: RunTask, name: str) -> None:
    """Evaluate the checkpoint `name` (`run_folder.find_checkpoint`) in training processes.

    Raises:
        UserError: there is no such checkpoint, or it is another run's.
        RunError: the evaluation failed.
    """
    earlier = run_folder.look(config)
    plan = run_plan.make_plan(config, kept=earlier.plan if earlier else None, task=task)
    if earlier:
        run_folder.check_same_run(plan, earlier)
    folder = run_folder.find_checkpoint(plan, name)
    plan = trials.on_this_machine(plan, earlier)
    tokens, processes = count_text(plan.data.num_valid_tokens), plural(plan.num_processes, "process", "processes")
    log(f"{task.title}, evaluate: {folder} on {tokens} tokens, {processes}")
    print(f"  {plan.devices.text(plan.num_processes)}")
    if code := spawn(plan, "evaluate", str(folder)):
        raise RunError(f"the evaluation ended with exit code {code}; the messages above say why")
