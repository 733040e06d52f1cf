"""The launching process of a run: it plans a start, checks it, and starts the training processes.

Checks come first, the cheapest first: before torch is loaded, then before anything is written. The training processes
get the plan as a file, and RANK, LOCAL_RANK and WORLD_SIZE from torchrun's agent, which starts and watches them
(`nodes.agent`). This process waits for them, and trains nothing itself.
"""

import contextlib
import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zerokara import checkpoint
from zerokara.base import resources
from zerokara.base.errors import Fault, RunError, Stopped, refuse
from zerokara.base.progress import count_text, log, plural, seconds_text, summary
from zerokara.training import auto_settings
from zerokara.training.nodes.machines import Machines
from zerokara.training.planning import earlier_run, plan_table, run_folder, schedule
from zerokara.training.planning.earlier_run import EarlierRun
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan
from zerokara.training.spawning import spawn

TRIAL_SECONDS = 3600.0
"""Wait of the other machines for the first one's trials of the micro batch."""


@dataclass(frozen=True)
class Commands:
    """Commands that follow the step: one resumes the run, one converts its newest checkpoint."""

    resume: str
    convert: str


@dataclass(frozen=True)
class Start:
    """A start of a run that is planned and checked: what is known before anything is written."""

    plan: RunPlan
    resumed: EarlierRun | None  # the run that it goes on with
    is_finished: bool = False
    notes: tuple[str, ...] = ()
    """Lines for the user, below the plan."""


def check_start(plan: RunPlan, earlier: EarlierRun | None, redo: bool, commands: Commands) -> Start:
    """Check a start, the cheapest first; `earlier` is what the run folder holds.

    Raises:
        UserError: the plan does not fit the run in the folder; the limits leave no time, the disk or the memory no
            room; a source would be read too often; or the model to start from does not fit.
    """
    notes, faults, resumed = list[str](), list[Fault](), None if redo else earlier
    if resumed:
        resumption = earlier_run.resumption(plan, resumed, commands.resume)
        faults += resumption.faults
        if resumption.is_finished and not faults:
            return Start(plan, resumed, is_finished=True)
        texts = earlier_run.texts_of(resumption.changed)
        notes += [f"changed since this run's last start: {text}" for text in texts]
    elif earlier:
        faults += earlier_run.redo_faults(plan)
        notes += redo_notes(plan, earlier)
    steps = resumed.steps if resumed else ()
    seconds = resumed.state.seconds if resumed and resumed.state else 0.0
    refuse(faults or plan.faults(len(steps), seconds, commands.convert))
    plan = auto_settings.on_this_machine(plan, resumed)
    return Start(plan, resumed, notes=(*notes, *check_fits(plan, starts=not steps)))


def train(start: Start, machines: Machines, commands: Commands, sets_aside: bool) -> None:
    """Train to the end, here or on several machines; where `sets_aside`, set the run aside that lies in the folder.

    Raises:
        UserError: the machines do not fit together.
        RunError: the training failed.
        Stopped, KeyboardInterrupt: the run was asked to stop before its end.
    """
    plan, owns_run_dir, rendezvous = start.plan, True, None
    with contextlib.ExitStack() as stack:
        if machines.number > 1:
            from zerokara.training.nodes.rendezvous import check_consistent, join_rendezvous

            # Before the first machine knows the micro batch, it may have tried several, and compiled for each.
            rendezvous = stack.enter_context(join_rendezvous(machines))
            if machines.is_first:
                plan = auto_settings.with_micro_batch(plan, start.resumed)
                rendezvous.publish("micro_batch", plan.resolved.micro_batch)
            plan = plan.with_settings(micro_batch_size=rendezvous.wait_for("micro_batch", seconds=TRIAL_SECONDS))
            plan = check_consistent(rendezvous, plan)
            owns_run_dir = rendezvous.owns_run_dir(plan.run_dir)
            if owns_run_dir and not machines.is_first:
                stack.enter_context(run_folder.command_lock(plan.requested))
        else:
            plan = auto_settings.with_micro_batch(plan, start.resumed)
        if owns_run_dir:
            if sets_aside:  # the last thing before the start: a refusal above has cost nothing
                run_folder.set_aside(plan.run_dir)
            run_folder.claim(plan, list(plan_table.rows(plan, in_full=True)))
        if rendezvous:
            rendezvous.gather("claimed")
        count = plural(plan.num_processes, "process", "processes")
        print(f"starting {count}; importing torch takes seconds", flush=True)
        try:
            code = spawn(plan, "train", rendezvous=rendezvous, path=plan.run_dir / PLAN_NAME if owns_run_dir else None)
        except KeyboardInterrupt:
            raise Stopped(f"to resume: {commands.resume}") from None
        newest = _newest_at_end(plan, code, commands)
        if not machines.is_first:
            print(f"trained; the first machine, {machines.endpoint}, writes the record of the run")
            return
        task_rows = plan.task.finish(plan, commands, newest)
        rows = run_folder.summary_rows(run_folder.record(plan, newest), newest, plan.run_dir, task_rows)
        summary(f"trained {plan.run_dir}", rows, commands.convert)


def try_run(plan: RunPlan, machines: Machines) -> None:
    """Try a few steps of a run, and print how long all would take.

    Raises:
        RunError: they failed, or ran out of memory.
    """
    if machines.number > 1:
        print(f"  this machine alone is tried: start without --dry-run to compare all {machines.number}")
    seconds, steps = auto_settings.try_steps(plan)[1].seconds_per_step, plan.schedule.num_steps
    print(f"all {steps:,} steps would take {seconds_text(steps * seconds)}, validations and saves not counted")
    print("dry run: everything is in order; nothing was written in the run folder")


def redo_notes(plan: RunPlan, earlier: EarlierRun) -> list[str]:
    """Tell what it means to set aside the run that lies in the folder."""
    steps, old = earlier.steps, run_folder.name_aside(plan.run_dir)
    standing = "it is complete; " if earlier.ended_at else ""
    reached = f"its newest checkpoint is of step {steps[-1]:,}" if steps else "it has no checkpoint"
    return [
        f"--redo sets the run {plan.run_dir} aside as {old}: {standing}{reached}",
        f"once you no longer need it: {shlex.join(['rm', '-r', str(old)])}",
    ]


def check_fits(plan: RunPlan, starts: bool) -> list[str]:
    """Check that a run can fit into this machine's memory, its teachers, and, where it `starts`, the model it starts
    from.

    Returns a line for the plan about that model's new vocabulary, if it gets one.

    Raises:
        UserError: it cannot; there is no such model, or none that can teach, or that this run can start from. For that
            torch is loaded.
    """
    lines: list[str] = []
    config, source = plan.resolved, plan.resolved.init_from if starts else ""
    if source or config.teachers:
        from zerokara.huggingface import from_hf
    if source:
        vocabulary = from_hf.check_source(Path(source), plan.shape, plan.encoder, config.new_embeddings, config.fault)
        lines += [f"new_embeddings: {config.new_embeddings}: {vocabulary.row}"] if vocabulary else []
    for name in config.teachers:
        from_hf.teacher_of(Path(name), plan.encoder, plan.shape.seq_len, partial(plan.teacher_fault, name))
    alone = replace(plan.memory, main_bytes=resources.total_memory(plan.processes_per_node))
    refuse(alone.faults(plan.requested))  # with other programs, it is noted in the plan
    return lines


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
    if state and schedule.has_reached_max_hours(plan.requested, state.seconds):
        raise Stopped(f"max_hours is reached: {schedule.RAISE}; or take what is there: {commands.convert}")
    raise Stopped(f"to resume: {commands.resume}")


def evaluate(plan: RunPlan, earlier: EarlierRun | None, name: str) -> None:
    """Evaluate the checkpoint `name` (`run_folder.find_checkpoint`) in training processes.

    Raises:
        UserError: there is no such checkpoint, or it is another run's.
        RunError: the evaluation failed.
    """
    plan = plan.with_settings(teachers=())  # which a validation does not ask
    refuse(earlier_run.resume_faults(plan, earlier) if earlier else [])
    folder = run_folder.find_checkpoint(plan, name)
    plan = auto_settings.on_this_machine(plan, earlier)
    there, most = plan.data.num_valid_tokens, plan.resolved.eval_tokens
    tokens = count_text(there if most == "all" else min(most, there))
    processes = plural(plan.num_processes, "process", "processes")
    log(f"{plan.task.title}, evaluate: {folder} on {tokens} tokens, {processes}")
    print(f"  {plan.devices.text(plan.num_processes)}")
    if code := spawn(plan, "evaluate", str(folder)):
        raise RunError(f"the evaluation ended with exit code {code}; the messages above say why")
