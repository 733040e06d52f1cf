"""Tokens and epochs that a run takes of each source, by stage and in total, before it starts.

The counts are those of the order itself, exact to the sample. One case would take too long: a partial, shuffled epoch
over several sources and very many sequences; there each source has its share, marked `about`. Without torch, so that
the table is shown at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zerokara.config.data import DataOrderSettings
from zerokara.config.optim import ScheduleSettings
from zerokara.config.pretrain_config import TrainingSettings
from zerokara.errors import Fault, UserError
from zerokara.model.shapes import ModelShape
from zerokara.samples.mixed_order import MixedOrder
from zerokara.samples.order import SampleOrder
from zerokara.training.planning.recipe import Situation
from zerokara.training.planning.schedule import Schedule, num_samples

if TYPE_CHECKING:  # of examples, for which `count_tokens.py` need not wait
    from zerokara.samples.reading import Reading

MAX_COUNTED_SAMPLES = 1 << 21
"""Samples of a shuffled epoch that are counted one by one, in about half a second."""
_NAME_WIDTH = 40


@dataclass(frozen=True)
class SourceUse:
    """One source in one stage, or in the whole run."""

    name: str
    available_tokens: int
    used_tokens: int
    """Counted as often as they are read."""
    epochs: float


@dataclass(frozen=True)
class StageUse:
    """One stage."""

    title: str
    sources: tuple[SourceUse, ...]
    first_token: int
    """Where it begins, in tokens of the run."""
    restarts: tuple[str, ...] = ()
    """A sentence for each source that it restarts."""

    @property
    def is_reached(self) -> bool:
        """Whether the run uses anything of it."""
        return any(use.used_tokens for use in self.sources)


@dataclass(frozen=True)
class Consumption:
    """The table before a run."""

    stages: tuple[StageUse, ...]
    """Empty where there is but one."""
    sources: tuple[SourceUse, ...]
    """Over the whole run."""
    exact: bool = True
    """False where `used_tokens` are shares of a partial epoch."""


def schedule_of(config: ScheduleSettings, plan: Reading) -> Schedule:
    """The schedule of a run that reads `plan`."""
    stage_samples = [stage.num_samples for stage in plan.stages]
    return Schedule.from_config(config, plan.lengths.raw, plan.samples_per_epoch, stage_samples)


def situation_of(config: TrainingSettings, shape: ModelShape, plan: Reading) -> Situation:
    """What the recipe of a run that reads `plan` goes by."""
    stage_samples = [stage.num_samples for stage in plan.stages]
    return Situation.of(config, shape, num_samples(config, plan.lengths.raw, plan.samples_per_epoch, stage_samples))


def consumption(plan: Reading, schedule: Schedule) -> Consumption:
    """The table of a run of so many steps."""
    num_samples = schedule.num_steps * schedule.global_batch_size
    order = plan.order()
    if isinstance(order, MixedOrder):
        return _of_mixture(plan, order, num_samples)
    return _of_stream(plan, order, num_samples)


def check_epochs(config: DataOrderSettings, table: Consumption) -> None:
    """Check that no source is read for more epochs than `max_epochs_per_source`.

    Raises:
        UserError: one is; with the table's numbers and what would do.
    """
    limit = config.max_epochs_per_source
    faults = [_too_often(config, use) for use in table.sources if use.epochs > limit]
    if faults:
        raise UserError(faults)


def table_lines(table: Consumption) -> Iterator[str]:
    """The table, for people."""
    yield _line("source", "tokens", "tokens used", "epochs")
    for number, stage in enumerate(table.stages, 1):
        yield f"stage {number} of {len(table.stages)}: {stage.title}"
        yield from (_use_line(use, table.exact) for use in stage.sources if use.used_tokens)
        yield from (f"  {words}" for words in stage.restarts if stage.is_reached)
        if not stage.is_reached:
            yield "  not reached"
    if table.stages:
        yield "total"
    yield from (_use_line(use, table.exact) for use in table.sources)


def warnings(config: ScheduleSettings, schedule: Schedule, table: Consumption) -> Iterator[str]:
    """A line for each stage that the run ends before: where it would begin, where the run ends, and what would do."""
    if config.max_steps == schedule.num_steps:
        remedy = f"raise max_steps above {schedule.num_steps:,}"
    elif config.train_tokens != "auto":
        remedy = "raise train_tokens, or set it to auto, which is as long as the stages"
    else:
        remedy = "raise epochs, which set the length of the rest"
    for number, stage in enumerate(table.stages, 1):
        if not stage.is_reached:
            yield (
                f"warning: stage {number} of {len(table.stages)} ({stage.title}) is never reached: it begins after "
                f"{stage.first_token:,} tokens, and the run ends after {schedule.num_tokens:,}; {remedy}, or shorten "
                "what comes before"
            )


def stage_title(plan: Reading, number: int) -> str:
    """Name, order and mixture of a stage, for people."""
    stage = plan.stages[number]
    total = sum(stage.weights)
    shares = [f"{weight / total:.3g}" for weight in stage.weights]
    mixed = f", sources {' : '.join(shares)}" if len(shares) > 1 else ""
    return f"{stage.name + ', ' if stage.name else ''}{stage.kind}{mixed}"


def stage_messages(
    plan: Reading, order: SampleOrder | MixedOrder, positions: range, resumed: bool = False
) -> Iterator[str]:
    """A message for each stage that begins within a step, and after a resume for the one in which the run stands."""
    if not isinstance(order, MixedOrder) or len(order.firsts) == 1:
        return
    current = bisect_right(order.firsts, positions.start) - 1
    for number, first in enumerate(order.firsts):
        words = f"stage {number + 1} of {len(order.firsts)}"
        if first in positions:
            yield f"{words} begins: {stage_title(plan, number)}"
        elif resumed and number == current:
            yield f"{words} continues: {stage_title(plan, number)}"


def _too_often(config: DataOrderSettings, use: SourceUse) -> Fault:
    rule = (
        f"would be exceeded: {use.name} has {use.available_tokens:,} tokens, the run uses {use.used_tokens:,}, "
        f"{use.epochs:.2f} epochs"
    )
    most = math.floor(use.used_tokens * config.max_epochs_per_source / use.epochs)
    remedy = (
        f"let the run use at most {most:,} tokens of it (a lower weight, fewer train_tokens), give it more text, or "
        f"set max_epochs_per_source to {math.ceil(use.epochs)}"
    )
    others = ("train_tokens", "epochs", "source_weights", "stages")
    return config.fault("max_epochs_per_source", rule, remedy, others)


def _of_mixture(plan: Reading, order: MixedOrder, num_samples: int) -> Consumption:
    by_stage = order.counts_by_stage(num_samples)
    uses = [_uses(plan, counts) for counts in by_stage]
    total = _uses(plan, [sum(column) for column in zip(*by_stage, strict=True)])
    if len(uses) == 1:
        return Consumption((), total)
    firsts = [first * plan.lengths.raw for first in order.firsts]
    stages = [
        StageUse(stage_title(plan, number), use, first, tuple(_restarts(plan, order, number)))
        for number, (use, first) in enumerate(zip(uses, firsts, strict=True))
    ]
    return Consumption(tuple(stages), total)


def _restarts(plan: Reading, order: MixedOrder, stage: int) -> Iterator[str]:
    for one in order.restarts:
        if one.stage == stage:
            there = plan.samples_per_part[one.source]
            yield (
                f"{plan.sources[one.source].name} restarts: an earlier stage, in another order, has read "
                f"{one.num_read:,} of its {there:,} sequences"
            )


def _uses(plan: Reading, samples_taken: Sequence[int]) -> tuple[SourceUse, ...]:
    return tuple(
        SourceUse(source.name, source.num_tokens, taken * plan.lengths.raw, taken / there if there else 0.0)
        for source, taken, there in zip(plan.sources, samples_taken, plan.samples_per_part, strict=True)
    )


def _of_stream(plan: Reading, order: SampleOrder, num_samples: int) -> Consumption:
    epochs, rest = divmod(num_samples, order.num_samples)
    whole = _tokens_of_each(plan, np.arange(1), order.num_samples)
    exact = True
    if len(plan.sources) == 1 or order.kind == "sequential" or not rest:
        part = _tokens_of_each(plan, np.arange(1), rest)
    elif min(rest, order.num_samples - rest) <= MAX_COUNTED_SAMPLES:
        # The fewer of the samples that the partial epoch reads and those that it leaves.
        first, last = (0, rest) if 2 * rest <= order.num_samples else (rest, order.num_samples)
        _, indices = order.at_many(epochs * order.num_samples + np.arange(first, last, dtype=np.int64))
        part = _tokens_of_each(plan, indices, 1)
        part = whole - part if first else part
    else:
        part, exact = np.round(whole * (rest / order.num_samples)).astype(np.int64), False
    uses = [
        SourceUse(source.name, source.num_tokens, taken, taken / there if there else 0.0)
        for source, taken, there in zip(plan.sources, (epochs * whole + part).tolist(), whole.tolist(), strict=True)
    ]
    return Consumption((), tuple(uses), exact)


def _tokens_of_each(plan: Reading, indices: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Tokens of each source in stretches of `length` samples that begin at the samples `indices` of the stream."""
    starts = indices * plan.lengths.raw
    ends = starts + length * plan.lengths.raw
    return np.array(
        [
            int(np.maximum(0, np.minimum(ends, source.end_token) - np.maximum(starts, source.first_token)).sum())
            for source in plan.sources
        ],
        dtype=np.int64,
    )


def _use_line(use: SourceUse, exact: bool) -> str:
    name = use.name if len(use.name) <= _NAME_WIDTH else "…" + use.name[1 - _NAME_WIDTH :]
    about = "" if exact else "about "
    return _line(name, f"{use.available_tokens:,}", f"{about}{use.used_tokens:,}", f"{use.epochs:.3f}")


def _line(name: str, there: str, taken: str, epochs: str) -> str:
    return f"  {name:<{_NAME_WIDTH}}  {there:>18}  {taken:>18}  {epochs:>8}"
