"""Tokens and epochs that a run takes of each source, by stage and in total, before it starts.

The counts are those of the order itself, exact to the sample. Only of a part of a shuffled epoch over several sources
has each its share, marked `about`. Without torch, so that the table is shown at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerokara.samples.mixed_order import MixedOrder
from zerokara.samples.order import SampleOrder
from zerokara.training.planning.schedule import Schedule

if TYPE_CHECKING:  # of examples, for which `count_tokens.py` need not wait
    from zerokara.samples.reading import Reading

_ROW = "  {:<40}  {:>18}  {:>18}  {:>8}"


@dataclass(frozen=True)
class SourceUse:
    """One source in one stage, or in the whole run."""

    name: str
    available_tokens: int
    used_tokens: int
    """Counted as often as they are read."""
    epochs: float


@dataclass(frozen=True)
class Consumption:
    """The table before a run."""

    stages: tuple[tuple[SourceUse, ...], ...]
    """The sources of each stage; empty where there is but one."""
    sources: tuple[SourceUse, ...]
    """Over the whole run."""
    exact: bool = True
    """False where `used_tokens` are shares of a partial epoch."""


def extent_of(reading: Reading) -> tuple[int, int, list[int | None]]:
    """Return what the length of a run depends on: tokens of a sample, samples of an epoch, and those of each stage."""
    return reading.lengths.raw, reading.samples_per_epoch, [stage.num_samples for stage in reading.stages]


def consumption(reading: Reading, schedule: Schedule) -> Consumption:
    """Count what a run of so many steps reads."""
    num_samples, order = schedule.num_steps * schedule.config.global_batch, reading.order()
    if not isinstance(order, MixedOrder):
        return _of_stream(reading, order, num_samples)
    stages = tuple(_uses(reading, counts) for counts in order.counts_by_stage(num_samples))
    return Consumption(stages if len(stages) > 1 else (), _uses(reading, order.counts(num_samples)))


def _uses(reading: Reading, samples_taken: Sequence[int]) -> tuple[SourceUse, ...]:
    return tuple(
        SourceUse(source.name, source.num_tokens, taken * reading.lengths.raw, taken / there if there else 0.0)
        for source, taken, there in zip(reading.sources, samples_taken, reading.samples_per_part, strict=True)
    )


def _of_stream(reading: Reading, order: SampleOrder, num_samples: int) -> Consumption:
    epochs, rest = divmod(num_samples, order.num_samples)
    is_exact = not rest or order.kind == "sequential" or len(reading.sources) == 1
    uses = []
    for source in reading.sources:
        # Of the tokens of a whole epoch, and of its first `rest` samples.
        ends = (min(source.end_token, samples * reading.lengths.raw) for samples in (order.num_samples, rest))
        whole, first = (max(0, end - source.first_token) for end in ends)
        taken = epochs * whole + (first if is_exact else round(whole * rest / order.num_samples))
        uses.append(SourceUse(source.name, source.num_tokens, taken, taken / whole if whole else 0.0))
    return Consumption((), tuple(uses), is_exact)


def table_lines(reading: Reading, schedule: Schedule, table: Consumption) -> Iterator[str]:
    """Return the table, for display; a stage that the run never reaches says what would do."""

    def row(use: SourceUse) -> str:
        taken = f"{'' if table.exact else 'about '}{use.used_tokens:,}"
        return _ROW.format(use.name, f"{use.available_tokens:,}", taken, f"{use.epochs:.3f}")

    yield _ROW.format("source", "tokens", "tokens used", "epochs")
    first_token = 0
    for number, sources in enumerate(table.stages):
        yield f"stage {number + 1} of {len(table.stages)}: {stage_title(reading, number)}"
        yield from (row(use) for use in sources if use.used_tokens)
        if first_token >= schedule.num_tokens:
            yield (
                f"  warning: never reached: it begins after {first_token:,} tokens, and the run ends after "
                f"{schedule.num_tokens:,}; raise train_tokens, epochs or max_steps, or shorten what comes before"
            )
        first_token += (reading.stages[number].num_samples or 0) * reading.lengths.raw
    if table.stages:
        yield "total"
    yield from map(row, table.sources)


def stage_title(reading: Reading, number: int) -> str:
    """Return name, order and mixture of a stage, for display."""
    stage = reading.stages[number]
    shares = [f"{weight / sum(stage.weights):.3g}" for weight in stage.weights]
    mixed = f", sources {' : '.join(shares)}" if len(shares) > 1 else ""
    return f"{stage.name + ', ' if stage.name else ''}{stage.kind}{mixed}"


def stage_messages(
    reading: Reading, order: SampleOrder | MixedOrder, positions: range, resumed: bool = False
) -> Iterator[str]:
    """Return a message for each stage that begins within a step, and after a resume for the one that goes on."""
    if not isinstance(order, MixedOrder) or len(order.firsts) == 1:
        return
    current = bisect_right(order.firsts, positions.start) - 1
    for number, first in enumerate(order.firsts):
        begins = first in positions
        if begins or (resumed and number == current):
            verb = "begins" if begins else "continues"
            yield f"stage {number + 1} of {len(order.firsts)} {verb}: {stage_title(reading, number)}"
