"""What is looked at before a run starts: checks that return faults, and the rows of the plan."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator

from zerokara.config.data import DataOrderSettings
from zerokara.config.optim import ScheduleSettings
from zerokara.errors import Fault
from zerokara.progress import bytes_text, count_text, plural, seconds_text
from zerokara.training.compute import optimizers, updater
from zerokara.training.planning import schedule
from zerokara.training.planning.run_folder import EarlierRun
from zerokara.training.planning.run_plan import RunPlan, baseline_text
from zerokara.training.planning.schedule import HOUR, SourceUse, stage_title

_CHECKED_IDS = 1 << 20
"""Ids whose range is checked, at the beginning and at the end of the data."""


def faults(plan: RunPlan, earlier: EarlierRun | None, take: str) -> Iterator[Fault]:
    """Check what a run needs before torch is loaded; `earlier` is what it resumes, `take` converts what is there."""
    config = plan.requested
    trained_seconds = earlier.state.seconds if earlier and earlier.state else 0.0
    yield from hours_faults(config, plan.checkpoint_bytes, trained_seconds, take)
    yield from disk_faults(plan, len(earlier.steps) if earlier else 0)
    yield from epochs_faults(config, plan.consumption.sources)
    yield from id_faults(plan)


def hours_faults(config: ScheduleSettings, checkpoint_bytes: int, trained_seconds: float, take: str) -> Iterator[Fault]:
    """Check that the limits of time leave anything to do; `take` is the command that converts what is there."""
    if schedule.hours_are_used_up(config, trained_seconds):
        rule = f"the run has been trained for {trained_seconds / HOUR:.3g} hours already, as long as it may"
        yield config.fault("max_hours", rule, f"{schedule.RAISE}; or take what is there: {take}")
    needed = schedule.leave_seconds(checkpoint_bytes)
    if config.max_hours_per_start != "auto" and config.max_hours_per_start * HOUR <= needed:
        rule = f"leaves no time to train: {seconds_text(needed)} are kept for saving and leaving"
        yield config.fault("max_hours_per_start", rule, "ask for more time")


def max_checkpoints(plan: RunPlan) -> int:
    """Return the largest number of checkpoints that exist at once."""
    config, num_steps, interval = plan.resolved, plan.schedule.num_steps, plan.resolved.save_interval
    if plan.task.saves_every_best and config.keep_best:  # each validation that finds a better one saves it
        interval = min(interval, config.eval_interval)
    # One more than is kept: an old one is deleted only when the new one is whole.
    standing = config.keep_last + 1 + (1 if config.keep_best and plan.data.num_valid_tokens else 0)
    if config.keep_every:
        standing += num_steps // math.lcm(config.keep_every, interval)
    return min(-(-num_steps // interval), standing)


def disk_faults(plan: RunPlan, existing: int = 0) -> Iterator[Fault]:
    """Check that the disk has space for the checkpoints, of which so many are there already."""
    config, each, standing = plan.resolved, plan.checkpoint_bytes, max_checkpoints(plan)
    needed, free = max(0, standing - existing) * each, _free_bytes(plan)
    if needed > free:
        rule = (
            f"leaves no room for its checkpoints: {standing} of {bytes_text(each)} will stand "
            f"at once and need {bytes_text(needed)} more, {bytes_text(free)} are free"
        )
        room = existing + free // each
        fitting = "not even one checkpoint fits"
        if room:  # so few saves that all of them may stay
            interval = -(-plan.schedule.num_steps // room)
            fitting = f"save_interval: {interval} fits, with keep_every: 0 and keep_best: false"
        yield config.fault("output_model_dir", rule, f"make room, or choose another disk; {fitting}")


def _free_bytes(plan: RunPlan) -> int:
    place = next(parent for parent in [plan.run_dir.absolute(), *plan.run_dir.absolute().parents] if parent.exists())
    return shutil.disk_usage(place).free


def epochs_faults(config: DataOrderSettings, sources: tuple[SourceUse, ...]) -> Iterator[Fault]:
    """Check that no source is read for more epochs than `max_epochs_per_source`."""
    limit = config.max_epochs_per_source
    for use in sources:
        if use.epochs > limit:
            taken = f"{use.used_tokens:,} of the {use.available_tokens:,} tokens of {use.name}"
            rule = f"would be exceeded: the run takes {taken}, {use.epochs:.2f} epochs"
            most = math.floor(use.used_tokens * limit / use.epochs)
            remedy = f"let it take at most {most:,} (a lower weight, fewer train_tokens), give it more text, or set "
            remedy += f"max_epochs_per_source: {math.ceil(use.epochs)}"
            others = ("train_tokens", "epochs", "source_weights", "stages")
            yield config.fault("max_epochs_per_source", rule, remedy, others)


def memory_faults(plan: RunPlan) -> Iterator[Fault]:
    """Check that a run may fit into the memory that is installed: its state, and the least that activations take.

    What may fit or not, or not beside what else runs there, is noted in the plan, and left to the user.
    """
    forecast = plan.memory_alone
    for pool in forecast.pools:
        if pool.needed_bytes(1) > pool.available_bytes:
            needed, there = bytes_text(pool.needed_bytes(1)), bytes_text(pool.available_bytes)
            processes = plural(pool.num_processes, "process", "processes")
            key, remedy = forecast.remedy()
            yield plan.requested.fault(
                key, f"needs at least {needed} of {pool.name} for {processes}; there is {there}", remedy
            )


def id_faults(plan: RunPlan) -> Iterator[Fault]:
    """Check that the ids at both ends of the data are the tokenizer's."""
    tokens, vocab_size = plan.data.ids, plan.encoder.vocab_size
    largest = max(int(part.max(initial=0)) for part in (tokens[:_CHECKED_IDS], tokens[-_CHECKED_IDS:]))
    if largest >= vocab_size:
        rule = f"holds the id {largest}; the tokenizer has {vocab_size} pieces"
        yield Fault(where=f"{plan.data.train_prefix}.bin", rule=rule, remedy="run step 2 again with --redo")


def plan_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Return what the run will do, by name, for display."""
    config, shape, course, lengths = plan.resolved, plan.shape, plan.schedule, plan.data.objective.lengths
    train, valid = count_text(plan.data.num_train_tokens), count_text(plan.data.num_valid_tokens)
    samples = f"sequences of {lengths.input} tokens"
    if lengths.num_noise_tokens:
        samples = (
            f"samples of {lengths.raw} tokens with {lengths.num_spans} masked spans: encoder input {lengths.input} "
            f"tokens, decoder target {lengths.target} tokens"
        )
    reading = plan.data.reading
    order = f"{len(reading.stages)} stages" if reading.stages[1:] else f"{reading.kind} order"
    if len(reading.stages) == 1:
        order = f"mixed: {stage_title(reading, 0)}"
    masked = ", intra-document masking" if config.intra_document_masking else ""
    length = (
        f"{course.num_steps:,} steps × {config.global_batch} sequences = {count_text(course.num_tokens)} "
        f"tokens = {course.epochs_at(course.num_steps):.3f} epochs; {course.warmup_steps} warm-up steps"
    )
    micro_steps = config.global_batch // (config.micro_batch * plan.data_parallel_size)
    batch = f"micro batch {config.micro_batch}, {micro_steps} gradient accumulation step{'s' * (micro_steps > 1)}"
    updater_lines = updater.plan_lines(config, plan.data_parallel_size, plan.nodes, plan.template)
    processes = f"{plan.num_processes}" + (f" on {plan.nodes} machines" if plan.nodes > 1 else "")
    standing, each = max_checkpoints(plan), plan.checkpoint_bytes
    checkpoints = f"{bytes_text(each)}; {standing} at once at most, {bytes_text(standing * each)} in all"
    head = plan.data.ids[:24].tolist()
    begins = f"{' '.join(str(one) for one in head[:8])} … = {plan.encoder.decode(head)!r}"
    return [
        ("model", f"{config.architecture}, {shape.size_text}, {samples}"),
        ("data", f"{train} training tokens, {valid} validation tokens, {order}{masked}"),
        *plan.data.plan_rows,
        ("length", length),
        ("processes", f"{processes}, ZeRO stage {config.zero_stage}, {config.precision}, {batch}"),
        *(("recipe", f"{key} {getattr(config, key)}: {reason}") for key, reason in plan.reasons.items()),
        *(("optimizer", line) for line in optimizers.plan_lines(config, shape)),
        *(("updater", line) for line in updater_lines),
        ("baseline", baseline_text(plan.data.unigram_entropy)),
        ("checkpoint", f"{checkpoints}; {bytes_text(_free_bytes(plan))} are free"),
        ("data begins", begins),
        ("tokenizer", f"sha256 {plan.encoder.sha256[:12]}…, the one that the data was made with"),
    ]
