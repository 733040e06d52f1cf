"""The launching process of a run: it plans, checks, locks the run folder, and starts the training processes.

Checks come first, the cheapest first: before torch is loaded, then before anything is written. The training processes
get the plan as a file, and RANK, LOCAL_RANK and WORLD_SIZE from torchrun's agent, which starts and watches them
(`nodes.agent`). This process waits for them, and trains nothing itself.

On a GPU `micro_batch_size: auto` becomes the largest that fits, found by trials whose peak memory is measured; on a CPU
one with as many tokens as make it fastest. Another size adds the same numbers up in another order, so a run keeps its
micro batch as long as the settings of `_MICRO_BATCH_SETTINGS` stay.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from zerokara import checkpoint
from zerokara.config.pretrain_config import RunConfig
from zerokara.errors import INTERRUPTED, RunError, Stopped, UserError
from zerokara.model import loopback
from zerokara.progress import bytes_text, count_text, log, plural, seconds_text, summary
from zerokara.training.nodes.machines import Machines
from zerokara.training.planning import processors, run_folder, run_plan, schedule
from zerokara.training.planning.memory import SAFE_SHARE, TrialResult, min_activation_bytes
from zerokara.training.planning.run_folder import EarlierRun
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan, RunTask
from zerokara.training.planning.schedule import table_lines
from zerokara.training.processes import supervision

if TYPE_CHECKING:  # it imports torch
    from zerokara.training.nodes.meeting import Meeting

TRIAL_SECONDS = 3600.0
"""Wait of the other machines for the first one's trials of the micro batch."""
CPU_TOKENS = 2048
"""Tokens of the largest micro batch on a CPU: a larger matrix product is no faster. Measured."""
_MICRO_BATCH_SETTINGS = {
    "global_batch_size", "precision", "optimizer", "zero_stage", "tensor_parallel_size", "offload",
    "activation_checkpointing", "seq_len",
}  # fmt: skip


@dataclass(frozen=True)
class Commands:
    """Commands that follow the step: one resumes the run, one converts its newest checkpoint."""

    resume: str
    convert: str


def train(config: RunConfig, task: RunTask, commands: Commands, machines: Machines, redo: bool, dry_run: bool) -> None:
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
        plan = run_plan.make_plan(config, kept=resumed.requested if resumed else None, nodes=machines.number, task=task)
        lines = run_folder.check_redo(plan, earlier) if earlier and redo else []
        changes = run_folder.check_same_run(plan, resumed) if resumed else []
        if resumed and run_folder.is_complete(plan, resumed, changes):
            print(f"{task.title}: {plan.run_dir} is complete already; --redo sets it aside and trains again")
            print(f"next: {commands.convert}")
            return
        trained_seconds = resumed.state.seconds if resumed and resumed.state else 0.0
        if faults := [
            *schedule.hours_faults(plan.requested, plan.checkpoint_bytes, trained_seconds, commands.convert),
            *schedule.epochs_faults(plan.requested, plan.consumption.sources),
            *plan.faults(len(resumed.steps) if resumed else 0),
        ]:
            raise UserError(faults)
        plan = on_this_machine(plan, resumed)
        check_fits(plan, starts=not (resumed and resumed.steps))
        changes += changed_choices(plan, resumed) if resumed else []
        show(plan, [*lines, *(f"changed since this run's last start: {each}" for each in changes)])
        if dry_run:
            if machines.number > 1:
                print(f"  this machine alone is tried: start without --dry-run to compare all {machines.number}")
            seconds, steps = try_steps(plan)[1].seconds_per_step, plan.schedule.num_steps
            print(f"all {steps:,} steps would take {seconds_text(steps * seconds)}, validations and saves not counted")
            print("dry run: everything is in order; nothing was written in the run folder")
            return
        owns_run_dir, meeting = True, None
        if machines.number > 1:
            from zerokara.training.nodes.meeting import check_consistent, meet

            # Before the first machine knows the micro batch, it may have tried several, and compiled for each.
            meeting = stack.enter_context(meet(machines))
            if machines.is_first:
                meeting.publish("micro_batch", with_micro_batch(plan, resumed).resolved.micro_batch)
            plan = plan.with_settings(micro_batch_size=meeting.wait_for("micro_batch", seconds=TRIAL_SECONDS))
            plan = check_consistent(meeting, plan)
            owns_run_dir = meeting.owns_run_dir(plan.run_dir)
            if owns_run_dir and not machines.is_first:
                stack.enter_context(run_folder.command_lock(config))
        else:
            plan = with_micro_batch(plan, resumed)
        if owns_run_dir:
            if redo and earlier:  # the last thing before the start: a refusal above has cost nothing
                run_folder.set_aside(plan.run_dir)
            run_folder.claim(plan)
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


def on_this_machine(plan: RunPlan, earlier: EarlierRun | None = None) -> RunPlan:
    """Resolve devices, precision, processes and micro batch. From here on torch may be loaded.

    On a GPU a micro batch that no earlier start has chosen is a first guess: see `with_micro_batch`.

    Raises:
        UserError: there are too few GPUs or cores.
    """
    config, devices = plan.requested, processors.devices()
    micro = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    plan = replace(plan, devices=devices).with_settings(precision=devices.precision(config), micro_batch_size=micro)
    # On a CPU as many as share the batch and fit, at last 1.
    for number in devices.process_counts(config, plan.schedule.batch_tokens // plan.nodes):
        shares_batch = plan.resolved.global_batch % (plan.nodes * number * micro) == 0
        if shares_batch and replace(plan, num_processes=plan.nodes * number).memory.fits:
            break
    plan = plan.on_processes(plan.nodes * number)
    if config.micro_batch_size == "auto":
        plan = plan.with_settings(micro_batch_size=kept_micro_batch(plan, earlier) or first_micro_batch(plan))
    return plan


def check_fits(plan: RunPlan, starts: bool) -> None:
    """Check that a run can fit into this machine's memory, and, where it `starts`, the model it starts from.

    Raises:
        UserError: it cannot; there is no such model, or none that this run can start from. For that torch is loaded.
    """
    if plan.resolved.init_from and starts:
        from zerokara.huggingface import from_hf

        source, extends_vocabulary = Path(plan.resolved.init_from), plan.resolved.resize_vocabulary == "mean"
        from_hf.check_source(source, plan.shape, plan.encoder, extends_vocabulary, plan.resolved.fault)
    if faults := list(plan.memory_alone.faults(plan.requested)):  # with other programs, it is noted in the plan
        raise UserError(faults)


def changed_choices(plan: RunPlan, earlier: EarlierRun) -> Iterator[str]:
    """Yield a message for the micro batch of `auto` and for the learning rate where they differ from the last start."""
    before, now = earlier.plan.get("resolved", {}).get("micro_batch_size"), plan.resolved.micro_batch_size
    if plan.requested.micro_batch_size == "auto" and before not in (None, now):
        yield f"micro_batch_size: auto was {before}, is now {now}: the same sums in another order"
    if earlier.state is not None and (rate := earlier.state.facts.get("learning_rate")):
        step = earlier.state.step
        planned = plan.schedule.learning_rate(step)
        if not math.isclose(planned, rate, rel_tol=1e-6):  # a run that is made longer has another schedule
            verb = "rises" if planned > rate else "falls"
            yield f"learning rate: {verb} from {rate:.2e} at step {step:,} to {planned:.2e}, as the new schedule has it"


def show(plan: RunPlan, lines: Sequence[str]) -> None:
    """Print a plan, and further lines below it."""
    log(f"{plan.task.title}: {plan.data.train_prefix} → {plan.run_dir}")
    device = ("device", plan.devices.text(plan.processes_per_node))
    notes = (("note", each) for each in plan.devices.notes(plan.resolved, plan.shape.num_parameters()))
    for name, value in [device, *plan.rows(), *plan.memory.rows(), *notes]:
        print(f"  {name:<12}  {value}")
    for line in [*table_lines(plan.data.reading, plan.schedule, plan.consumption), *lines]:
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
    plan = run_plan.make_plan(config, kept=earlier.requested if earlier else None, task=task)
    if earlier:
        run_folder.check_same_run(plan, earlier)
    folder = run_folder.find_checkpoint(plan, name)
    plan = on_this_machine(plan, earlier)
    tokens, processes = count_text(plan.data.num_valid_tokens), plural(plan.num_processes, "process", "processes")
    log(f"{task.title}, evaluate: {folder} on {tokens} tokens, {processes}")
    print(f"  {plan.devices.text(plan.num_processes)}")
    if code := spawn(plan, "evaluate", str(folder)):
        raise RunError(f"the evaluation ended with exit code {code}; the messages above say why")


def first_micro_batch(plan: RunPlan) -> int:
    """Return the largest size that almost certainly fits, on a CPU no larger than is faster; 1 where none does."""
    forecast = plan.memory
    sizes = forecast.micro_batch_sizes
    if forecast.device == "cpu":
        enough = [size for size in sizes if size * forecast.shape.input_len >= CPU_TOKENS]
        sizes = [size for size in sizes if not enough or size <= enough[0]]
    return next((size for size in reversed(sizes) if forecast.with_settings(micro_batch_size=size).fits), 1)


def kept_micro_batch(plan: RunPlan, earlier: EarlierRun | None) -> int | None:
    """Return the size of the run's last start, where that was `auto` too, in the same layout on the same machine."""
    was, gpu_bytes = earlier.plan if earlier else {}, plan.devices.gpu_bytes
    if "resolved" not in was or was["requested"]["micro_batch_size"] != "auto":
        return None
    before = [was["num_processes"], was["nodes"], was["deepspeed_template"]]
    before.append(was["devices"]["gpu_bytes"] if "devices" in was else gpu_bytes)  # earlier versions kept it elsewhere
    is_same = before == [plan.num_processes, plan.nodes, plan.requested_template, gpu_bytes]
    is_same &= all(was["resolved"][key] == getattr(plan.resolved, key) for key in _MICRO_BATCH_SETTINGS)
    return int(was["resolved"]["micro_batch_size"]) if is_same else None


def with_micro_batch(plan: RunPlan, earlier: EarlierRun | None) -> RunPlan:
    """Return the plan with its final micro batch: on a GPU that of trials, unless an earlier start has made them."""
    is_known = plan.memory.device == "cpu" or kept_micro_batch(plan, earlier)
    return plan if is_known or plan.requested.micro_batch_size != "auto" else try_steps(plan)[0]


def try_steps(plan: RunPlan) -> tuple[RunPlan, TrialResult]:
    """Train a few steps that leave nothing behind; return the plan, on a GPU with the micro batch for `auto`.

    This machine trains alone: its processes then hold at least as much as among several.

    Raises:
        RunError: they failed, or ran out of memory with a micro batch that the user chose or that is the smallest.
    """
    alone = plan.on_processes(plan.processes_per_node, 1)
    print(f"trying a few steps in {plural(alone.num_processes, 'process', 'processes')}", flush=True)
    if plan.requested.micro_batch_size != "auto" or alone.memory.device == "cpu":
        size, result = plan.resolved.micro_batch, _tried(alone)
    else:
        size, result = _largest_on_gpu(alone)
    if result is None:
        raise RunError("the trial ran out of memory; the messages above say where. Nothing was written")
    return plan.with_settings(micro_batch_size=size), result


def _largest_on_gpu(plan: RunPlan) -> tuple[int, TrialResult | None]:
    """Find the largest micro batch that fits, from the measured peaks of smaller ones; None where not even 1 does.

    Two neighbours are tried first, the larger of which almost certainly fits: their difference is what a sequence takes
    (at least its `min_activation_bytes`: the update may set both peaks). The largest that fits by that is next, and
    smaller ones where it does not.

    Example: 14 GB with 4 sequences and 18 GB with 8 of at most 256, within 80 GB: 64 is next. If that takes 74 GB, it
    is the choice; if it runs out of memory, 32 is next.
    """
    forecast = plan.memory
    sizes, gpu = forecast.micro_batch_sizes, forecast.pools[0]
    limit_bytes = SAFE_SHARE * gpu.available_bytes - sum(forecast.uncounted.values())
    least = min_activation_bytes(forecast.with_settings(micro_batch_size=1))
    before_first = max(0, sizes.index(first_micro_batch(plan)) - 1)
    waiting, fitting = sizes[before_first : before_first + 2], dict[int, TrialResult]()
    while waiting:
        size = waiting.pop(0)
        print(f"micro_batch_size: auto: trying {size}", flush=True)
        result = _tried(plan.with_settings(micro_batch_size=size))
        fits = result is not None and result.peak_bytes <= limit_bytes
        peak = "ran out of memory" if result is None else f"took {bytes_text(result.peak_bytes)}"
        print(f"micro_batch_size: auto: {size} {'fits' if fits else 'does not fit'}: a process {peak}", flush=True)
        if result is not None and fits:
            fitting[size] = result
            if len(fitting) > 1 and not waiting:
                smaller = sorted(fitting)[-2]
                grown = (result.peak_bytes - fitting[smaller].peak_bytes) / (size - smaller)
                reach = size + (limit_bytes - result.peak_bytes) / max(least, grown)
                waiting = [each for each in sizes if size < each <= reach][-1:]
        else:
            sizes = [each for each in sizes if each < size]
            if not sizes:
                return size, result
            waiting = [each for each in sizes if each > max(fitting, default=0)][-1:]
    return max(fitting), fitting[max(fitting)]


def _tried(plan: RunPlan) -> TrialResult | None:
    """Run a trial; None where a process ran out of memory."""
    with tempfile.TemporaryDirectory(prefix="zerokara-trial-") as folder:
        path = Path(folder, "result.json")
        code = spawn(plan, "trial", str(path))
        if code and code != supervision.OUT_OF_MEMORY:
            raise RunError(f"the trial ended with exit code {code}; the messages above say why. Nothing was written")
        return None if code else TrialResult(**orjson.loads(path.read_bytes()))


def spawn(plan: RunPlan, *work: str, meeting: Meeting | None = None, path: Path | None = None) -> int:
    """Run the training processes, which do `work` (`worker.main`), here or on each of the machines of a `meeting`.

    `path` is the file of the plan, where the run folder has one; otherwise a temporary one is written.

    Returns the exit code of the first process that fails, 0 where none does; the others are ended. Ctrl-C, SIGTERM and
    SIGHUP ask the training processes to stop at the end of a step; a second Ctrl-C kills them. If this process is
    killed, they save and exit. On several machines the run survives lost processes and machines, `max_restarts` times.

    Raises:
        KeyboardInterrupt: they were asked to stop, and have saved.
    """
    network = loopback.environment()
    if meeting:
        network = loopback.environment(meeting.address) | {supervision.FOLDER_NAME: str(meeting.folder_owner)}
    oom_kills_before = supervision.num_oom_kills()
    with contextlib.ExitStack() as stack:
        if path is None:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zerokara-plan-")), PLAN_NAME)
            plan.write(path)
        place, own = stack.enter_context(rendezvous()), plan.devices.process_environment(plan.processes_per_node)
        # The environment of this process, too: libraries read some variables when they are loaded.
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.clear)
        os.environ |= {**network, **own, **place}
        # Where torch is loaded for the agent alone, the processes are forked, and need not load it once more. Where it
        # is there already it may have used a GPU or threads, with which a process cannot be forked.
        is_forked = "torch" not in sys.modules
        from zerokara.training.nodes import agent

        code = agent.run(plan, [str(path), *work], is_forked, meeting)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == -signal.SIGKILL and meeting is None:
        print(f"failed: {supervision.kill_message(oom_kills_before)}", file=sys.stderr)
    return code


@contextlib.contextmanager
def rendezvous() -> Iterator[dict[str, str]]:
    """Keep the rendezvous of this machine's processes as long as the block lasts; yield it for their environment.

    torch's usual one is a TCP port, which every user of the machine can reach, and change what is agreed there. This is
    a file without a name, in memory (memfd_create(2)). Processes open it through /proc, which Linux allows to the same
    user alone; it is gone with the last one that holds it.
    """
    with open(os.memfd_create("zerokara_rendezvous"), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        yield {supervision.RENDEZVOUS_NAME: f"/proc/{os.getpid()}/fd/{file.fileno()}"}
