"""The length and the learning rate of a run: pure functions of the configuration and the number of samples.

The user sets the length (tokens, epochs, or the stages of a curriculum; `max_steps` caps it) and the share of the
warm-up; steps, warm-up and decay follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerokara.config.optim import ScheduleSettings
from zerokara.config.settings import resolved
from zerokara.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """Number of steps and learning rate of a run."""

    num_steps: int
    warmup_steps: int
    global_batch_size: int
    sample_tokens: int
    """Tokens of the corpus in one sample (its raw length)."""
    samples_per_epoch: int
    lr: float
    min_lr: float
    shape: str
    decay_steps: int = 0
    """Of `wsd`: the steps at the end in which the learning rate falls."""

    @classmethod
    def from_config(
        cls,
        config: ScheduleSettings,
        sample_tokens: int,
        samples_per_epoch: int,
        stage_samples: Sequence[int | None] = (),
    ) -> Schedule:
        """Derive the steps from `train_tokens`, or from `epochs` over `samples_per_epoch` sequences.

        A sample takes `sample_tokens` tokens of the corpus. `stage_samples` are the sequences of each stage of a
        curriculum, None for one that takes the rest.

        Raises:
            UserError: the stages together have fewer sequences than one step takes; the run would end before the
                warm-up, or before it and the decay of `wsd`.
        """
        num_steps = _num_steps(config, sample_tokens, samples_per_epoch, stage_samples)
        warmup_steps = _warmup_steps(config, num_steps)
        return cls(
            num_steps=num_steps,
            warmup_steps=warmup_steps,
            global_batch_size=config.global_batch,
            sample_tokens=sample_tokens,
            samples_per_epoch=samples_per_epoch,
            lr=config.peak_lr,
            min_lr=resolved(config.min_lr),
            shape=resolved(config.lr_schedule),
            decay_steps=_decay_steps(config, num_steps, warmup_steps) if config.lr_schedule == "wsd" else 0,
        )

    @property
    def batch_tokens(self) -> int:
        """Tokens that one step trains on."""
        return self.global_batch_size * self.sample_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole run trains on."""
        return self.num_steps * self.batch_tokens

    def epochs_at(self, step: int) -> float:
        """Epochs after `step` steps."""
        return step * self.global_batch_size / self.samples_per_epoch

    def learning_rate(self, step: int) -> float:
        """Learning rate of update `step`, counted from 1 to `num_steps`.

        Rises in a line from lr/warmup_steps to lr at step warmup_steps; then, but for `constant`, it goes from lr to
        min_lr, which it has at the last step, along the shape's curve (`_SHAPES`).
        """
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        share = _SHAPES[self.shape](self, step)
        return self.lr if share == 1 else self.min_lr + (self.lr - self.min_lr) * share  # unrounded where it stays


def learning_rate_change(schedule: Schedule, step: int, learning_rate: float) -> str:
    """Return a message where a run that resumes after `step` had another learning rate there; empty where it had not.

    A run that is made longer has a longer schedule: its learning rate, which had fallen, rises again.
    """
    now = schedule.learning_rate(step)
    if math.isclose(now, learning_rate, rel_tol=1e-6):
        return ""
    verb = "rises" if now > learning_rate else "falls"
    return f"learning rate: {verb} from {learning_rate:.2e} at step {step:,} to {now:.2e}, as the new schedule has it"


def _progress(schedule: Schedule, step: int) -> float:
    """From 0 at the end of the warm-up to 1 at the last step."""
    return (step - schedule.warmup_steps) / (schedule.num_steps - schedule.warmup_steps)


def _constant(schedule: Schedule, step: int) -> float:
    """Stays."""
    return 1.0


def _linear(schedule: Schedule, step: int) -> float:
    """Falls in a line."""
    return 1 - _progress(schedule, step)


def _cosine(schedule: Schedule, step: int) -> float:
    """(1 + cos(π·t)) / 2 with t from 0 to 1 (Loshchilov and Hutter, 2017)."""
    return (1 + math.cos(math.pi * _progress(schedule, step))) / 2


def _inverse_sqrt(schedule: Schedule, step: int) -> float:
    """√(warmup/step), T5's curve (Raffel et al., 2020), moved and stretched so that it ends at 0.

    So with warm-up W and N steps, lr(n) = min_lr + (lr - min_lr) · (√(W/n) - √(W/N)) / (1 - √(W/N)). Where min_lr is
    lr·√(W/N), the value that T5's own reaches, that is T5's own, lr·√(W/n); any other min_lr is met all the same.
    Without a warm-up W is 1: the first step then has lr.
    """
    warmup = max(1, schedule.warmup_steps)
    if schedule.num_steps == warmup:
        return 1.0
    last = math.sqrt(warmup / schedule.num_steps)
    return (math.sqrt(warmup / step) - last) / (1 - last)


def _wsd(schedule: Schedule, step: int) -> float:
    """Warm-up, stable, decay: stays, then falls in a line over the last `decay_steps` (Hu et al., 2024)."""
    return min(1.0, (schedule.num_steps - step) / schedule.decay_steps)


_SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "inverse_sqrt": _inverse_sqrt,
    "wsd": _wsd,
}
"""How much of the way from min_lr up to lr is left at a step behind the warm-up: from 1 to 0."""


_LENGTH = ("train_tokens", "epochs", "max_steps", "stages", "global_batch_size", "seq_len")
"""Settings that set the number of steps."""


def num_samples(
    config: ScheduleSettings, sample_tokens: int, samples_per_epoch: int, stage_samples: Sequence[int | None] = ()
) -> float:
    """The sequences of a run that no `max_steps` ends; arguments as those of `Schedule.from_config`."""
    if config.train_tokens != "auto":
        return config.train_tokens / sample_tokens
    rest = config.epochs * samples_per_epoch if _is_open(stage_samples) else 0
    return sum(samples or 0 for samples in stage_samples) + rest


def _is_open(stage_samples: Sequence[int | None]) -> bool:
    """Whether a run may go on for as long as it likes: there are no stages, or the last one takes the rest."""
    return not stage_samples or stage_samples[-1] is None


def _num_steps(
    config: ScheduleSettings, sample_tokens: int, samples_per_epoch: int, stage_samples: Sequence[int | None]
) -> int:
    declared, is_open = sum(samples or 0 for samples in stage_samples), _is_open(stage_samples)
    samples = num_samples(config, sample_tokens, samples_per_epoch, stage_samples)
    num_steps = max(1, round(samples / config.global_batch))
    if not is_open and num_steps * config.global_batch > declared:
        # Nothing follows the last stage: samples that do not fill a step are left out.
        num_steps = declared // config.global_batch
        if not num_steps:
            rule = f"have {declared:,} sequences of {sample_tokens} together, fewer than global_batch_size = "
            raise UserError(config.fault("stages", rule + f"{config.global_batch}", "give them more tokens"))
    return num_steps if config.max_steps == "auto" else min(num_steps, config.max_steps)


def _warmup_steps(config: ScheduleSettings, num_steps: int) -> int:
    """Fewer than there are steps: at least one comes after the warm-up."""
    if config.warmup_steps == "auto":
        return min(round(resolved(config.warmup_fraction) * num_steps), num_steps - 1)
    if config.warmup_steps >= num_steps:
        rule = f"must be fewer than the steps of the run, {num_steps:,}, or the learning rate never reaches lr"
        remedy = f"try {round(0.02 * num_steps)}, or auto for a share of the run (warmup_fraction)"
        raise UserError(config.fault("warmup_steps", rule, remedy, _LENGTH))
    return config.warmup_steps


def _decay_steps(config: ScheduleSettings, num_steps: int, warmup_steps: int) -> int:
    decay_steps = max(1, round(config.decay_fraction * num_steps))
    room = num_steps - warmup_steps
    # A share of the run and a number of steps: only here is it known whether both find room in it. (Of two shares the
    # configuration sees it before; one step that rounding adds is taken off again.)
    if config.warmup_steps != "auto" and decay_steps > room:
        rule = (
            f"means {decay_steps:,} of the run's {num_steps:,} steps, and the warm-up takes {warmup_steps:,} "
            "(warmup_steps)"
        )
        remedy = f"try at most {math.floor(100 * room / num_steps) / 100:g}, or a shorter warm-up"
        raise UserError(config.fault("decay_fraction", rule, remedy, _LENGTH))
    return min(decay_steps, room)
