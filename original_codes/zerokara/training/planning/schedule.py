"""The schedule of a run: its steps, its learning rate, its limits of time, and the tokens it takes of each source.

The user sets the length (tokens, epochs, or the stages of a curriculum; `max_steps` caps it) and the share of the
warm-up; steps, warm-up and decay follow. `max_hours` counts over all starts of a run.
Tokens of a source are counted by the order itself, exact to the sample; only in a partial shuffled epoch over several
sources are they estimated by its share, marked `about`. Without torch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerokara.base.errors import Fault, UserError
from zerokara.base.progress import count_text, plural
from zerokara.config.engine import ScheduleSettings
from zerokara.config.pretrain_config import RunConfig
from zerokara.config.settings import resolved
from zerokara.samples.order import MixedOrder, SampleOrder
from zerokara.samples.packed_tokens import DataPlan

RAISE = "raise it to go on"
_ROW = "  {:<40}  {:>18}  {:>18}  {:>8}"
# Settings that set the number of steps.
_LENGTH = ("train_tokens", "epochs", "max_steps", "stages", "global_batch_size", "seq_len")


@dataclass(frozen=True)
class Schedule:
    """Number of steps and learning rate of a run."""

    config: ScheduleSettings
    """Settings after the recipe."""
    num_steps: int
    warmup_steps: int
    decay_steps: int
    """Steps at the end of `wsd` in which the learning rate falls."""
    sample_tokens: int
    """Tokens of the corpus in one sample (its raw length)."""
    samples_per_epoch: int

    @classmethod
    def from_config(
        cls,
        config: ScheduleSettings,
        sample_tokens: int,
        samples_per_epoch: int,
        stage_samples: Sequence[int | None] = (),
    ) -> "Schedule":
        """Derive the steps; arguments as those of `num_samples`.

        Raises:
            UserError: the stages together, or the whole run, have fewer sequences than one step takes; the run would
                end before the warm-up, or before it and the decay of `wsd`.
        """
        batch, samples = config.global_batch, num_samples(config, sample_tokens, samples_per_epoch, stage_samples)
        num_steps = max(1, round(samples / batch))
        declared = sum(count or 0 for count in stage_samples)
        if stage_samples and stage_samples[-1] is not None:
            # Nothing follows the last stage: samples that do not fill a step are left out.
            num_steps = min(num_steps, declared // batch)
            if not num_steps:
                rule = f"have {declared:,} sequences of {sample_tokens} together, fewer than global_batch_size = "
                rule += str(batch)
                raise UserError(config.fault("stages", rule, "give them more tokens", ["global_batch_size"]))
        elif batch > 1.1 * max(samples, samples_per_epoch):
            rule = f"is more than the {samples:,.0f} sequences of the whole run: its one step would read "
            rule += f"{batch / samples_per_epoch:.3g} epochs, not {samples / samples_per_epoch:.3g}"
            remedy = f"try {max(1, math.floor(samples))}, with micro_batch_size: auto; or a longer run"
            raise UserError(config.fault("global_batch_size", rule, remedy, _LENGTH))
        if config.max_steps != "auto":
            num_steps = min(num_steps, config.max_steps)

        if config.warmup_steps == "auto":  # at least one step comes after the warm-up
            warmup_steps = min(round(resolved(config.warmup_fraction) * num_steps), num_steps - 1)
        else:
            warmup_steps = config.warmup_steps
        if warmup_steps >= num_steps:
            rule = f"must be fewer than the steps of the run, {num_steps:,}"
            remedy = f"try {round(0.02 * num_steps)}, or auto and warmup_fraction: 0.02, a share of the run"
            raise UserError(config.fault("warmup_steps", rule, remedy, _LENGTH))
        decay_steps, room = max(1, round(config.decay_fraction * num_steps)), num_steps - warmup_steps
        # Of two shares the configuration sees whether both find room; one step that rounding adds is taken off again.
        if config.lr_schedule == "wsd" and config.warmup_steps != "auto" and decay_steps > room:
            rule = f"means {decay_steps:,} of the run's {num_steps:,} steps, and warmup_steps takes {warmup_steps:,}"
            remedy = f"try at most {math.floor(100 * room / num_steps) / 100:g}, or a shorter warm-up"
            raise UserError(config.fault("decay_fraction", rule, remedy, ["warmup_steps", *_LENGTH]))
        decay_steps = min(decay_steps, room)
        return cls(config, num_steps, warmup_steps, decay_steps, sample_tokens, samples_per_epoch)

    @property
    def batch_tokens(self) -> int:
        return self.config.global_batch * self.sample_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole run trains on."""
        return self.num_steps * self.batch_tokens

    @property
    def epochs(self) -> float:
        return self.num_steps * self.config.global_batch / self.samples_per_epoch

    @property
    def text(self) -> str:
        """The length, for display."""
        sequences = f"{self.config.global_batch} sequences = {count_text(self.num_tokens)} tokens"
        epochs = f"{self.epochs:.3f} epochs; {plural(self.warmup_steps, 'warm-up step')}"
        return f"{plural(self.num_steps, 'step')} × {sequences} = {epochs}"

    def learning_rate(self, step: int) -> float:
        """Learning rate of update `step`, counted from 1 to `num_steps`.

        Rises in a line from lr/warmup_steps to lr at step warmup_steps; then, but for `constant`, it goes from lr to
        min_lr, which it has at the last step.
        """
        lr, min_lr, kind = resolved(self.config.lr), resolved(self.config.min_lr), self.config.lr_schedule
        if step <= self.warmup_steps:
            return lr * step / self.warmup_steps
        progress = (step - self.warmup_steps) / (self.num_steps - self.warmup_steps)  # 1 at the last step
        if kind == "linear":
            share = 1 - progress
        elif kind == "cosine":  # Loshchilov and Hutter, 2017
            share = (1 + math.cos(math.pi * progress)) / 2
        elif kind == "wsd":  # warm-up, stable, decay: Hu et al., 2024
            share = min(1.0, (self.num_steps - step) / self.decay_steps)
        elif kind == "inverse_sqrt" and self.num_steps > max(1, self.warmup_steps):
            # T5's √(warmup/step) (Raffel et al., 2020), moved and stretched so that it ends at 0: where min_lr is the
            # value that T5's own reaches, this is T5's own. Without a warm-up the first step has lr.
            warmup = max(1, self.warmup_steps)
            last = math.sqrt(warmup / self.num_steps)
            share = (math.sqrt(warmup / step) - last) / (1 - last)
        else:
            share = 1.0
        return lr if share == 1 else min_lr + (lr - min_lr) * share  # unrounded where it stays


def num_samples(
    config: ScheduleSettings, sample_tokens: int, samples_per_epoch: int, stage_samples: Sequence[int | None] = ()
) -> float:
    """Return the sequences of a run that no `max_steps` ends: by `train_tokens`, or by `epochs` and stages.

    A sample takes `sample_tokens` tokens of the corpus. `stage_samples` are the sequences of each stage of a
    curriculum, None for a last one that takes the rest, `epochs` over `samples_per_epoch` sequences.
    """
    if config.train_tokens != "auto":
        return config.train_tokens / sample_tokens
    is_open = not stage_samples or stage_samples[-1] is None
    declared = sum(count or 0 for count in stage_samples)
    return declared + (resolved(config.epochs) * samples_per_epoch if is_open else 0)


def has_reached_max_hours(config: ScheduleSettings, trained_seconds: float) -> bool:
    """Tell whether a run that was trained for so many seconds has had its `max_hours`."""
    return config.max_hours != "auto" and trained_seconds >= 3600 * config.max_hours


@dataclass(frozen=True)
class SourceUse:
    """One source in one stage, or in the whole run."""

    name: str
    available_tokens: int
    used_tokens: int
    """Tokens over all epochs."""
    epochs: float


@dataclass(frozen=True)
class Consumption:
    """Tokens that a run takes of each source."""

    stages: tuple[tuple[SourceUse, ...], ...]
    """Sources of each stage; empty where there is only one stage."""
    sources: tuple[SourceUse, ...]
    """Sources over the whole run."""
    is_exact: bool = True
    """False if `used_tokens` are shares of a shuffled stream."""


def extent_of(training: DataPlan) -> tuple[int, int, list[int | None]]:
    """Return the tokens of a sample, the samples of an epoch, and those of each stage: the length depends on them."""
    stage_samples = [stage.num_samples for stage in training.stages]
    return training.lengths.raw, training.samples_per_epoch, stage_samples


def consumption(training: DataPlan, schedule: Schedule) -> Consumption:
    """Count the tokens that a run takes of each source."""
    num_samples, order = schedule.num_steps * schedule.config.global_batch, training.order()
    if not isinstance(order, MixedOrder):
        return _of_stream(training, order, num_samples)
    stages = tuple(_uses(training, counts) for counts in order.counts_by_stage(num_samples))
    return Consumption(stages if len(stages) > 1 else (), _uses(training, order.counts(num_samples)))


def epochs_faults(config: RunConfig, sources: tuple[SourceUse, ...]) -> Iterator[Fault]:
    """Check that no source is read for more epochs than `max_epochs_per_source`; a fine-tuning has no such limit."""
    limit = math.inf if config.packs_examples else config.max_epochs_per_source
    step = config.global_batch * config.lengths.raw  # the steps are rounded
    for use in sources:
        if use.epochs > limit and use.used_tokens * (1 - limit / use.epochs) >= step:
            taken = f"{use.used_tokens:,} of the {use.available_tokens:,} tokens of {use.name}"
            rule = f"would be exceeded: the run takes {taken}, {use.epochs:.2f} epochs"
            most = math.floor(use.used_tokens * limit / use.epochs)
            remedy = f"let it take at most {most:,} (a lower weight, fewer train_tokens), give it more text, or set "
            remedy += f"max_epochs_per_source: {math.ceil(use.epochs)}"
            reads = ("train_tokens", "epochs", "source_weights", "stages")
            yield config.fault("max_epochs_per_source", rule, remedy, reads)


def _uses(training: DataPlan, samples_taken: Sequence[int]) -> tuple[SourceUse, ...]:
    return tuple(
        SourceUse(source.name, source.num_tokens, taken * training.lengths.raw, taken / there if there else 0.0)
        for source, taken, there in zip(training.sources, samples_taken, training.samples_per_part, strict=True)
    )


def _of_stream(training: DataPlan, order: SampleOrder, num_samples: int) -> Consumption:
    epochs, rest = divmod(num_samples, order.num_samples)
    # Epochs after the first are cut elsewhere, and leave other tokens behind their last sample.
    is_exact = order.kind == "sequential" or len(training.sources) == 1 or num_samples == order.num_samples
    uses = []
    for source in training.sources:
        # Of the tokens of a whole epoch, and of its first `rest` samples.
        read = (samples * training.lengths.raw - source.first_token for samples in (order.num_samples, rest))
        whole, first = (min(max(0, tokens), source.num_tokens) for tokens in read)
        taken = epochs * whole + (first if is_exact else round(whole * rest / order.num_samples))
        uses.append(SourceUse(source.name, source.num_tokens, taken, taken / whole if whole else 0.0))
    return Consumption((), tuple(uses), is_exact)


def table_lines(training: DataPlan, schedule: Schedule, table: Consumption) -> Iterator[str]:
    """Yield the table, for display, with a remedy for a stage that the run never reaches."""

    def row(use: SourceUse) -> str:
        taken = f"{'' if table.is_exact else 'about '}{use.used_tokens:,}"
        return _ROW.format(use.name, f"{use.available_tokens:,}", taken, f"{use.epochs:.3f}")

    yield _ROW.format("source", "tokens", "tokens used", "epochs")
    first_token = 0
    for number, sources in enumerate(table.stages):
        yield f"stage {number + 1} of {len(table.stages)}: {stage_title(training, number)}"
        yield from (row(use) for use in sources if use.used_tokens)
        if first_token >= schedule.num_tokens:
            yield (
                f"  warning: never reached: it begins after {first_token:,} tokens, and the run ends after "
                f"{schedule.num_tokens:,}; raise train_tokens, epochs or max_steps, or shorten what comes before"
            )
        first_token += (training.stages[number].num_samples or 0) * training.lengths.raw
    if table.stages:
        yield "total"
    yield from map(row, table.sources)


def stage_title(training: DataPlan, number: int) -> str:
    """Return name, order and mixture of a stage, for display."""
    stage = training.stages[number]
    shares = [f"{weight / sum(stage.weights):.3g}" for weight in stage.weights]
    mixed = f", sources {' : '.join(shares)}" if len(shares) > 1 else ""
    return f"{stage.name + ', ' if stage.name else ''}{stage.kind}{mixed}"
