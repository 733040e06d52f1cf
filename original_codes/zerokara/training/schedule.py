"""How long a run is and how fast it learns: pure functions of the configuration and the number of samples.

The user says how long (tokens, epochs, or the stages of a curriculum) and which share is warm-up; steps, warm-up and
decay follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zerokara.config import PretrainConfig
from zerokara.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """A run's length and its learning rate."""

    num_steps: int
    warmup_steps: int
    global_batch_size: int
    seq_len: int
    samples_per_epoch: int
    lr: float
    min_lr: float
    shape: str

    @classmethod
    def from_config(
        cls, config: PretrainConfig, samples_per_epoch: int, stage_samples: Sequence[int | None] = ()
    ) -> Schedule:
        """Derive the steps from `train_tokens`, or from `epochs` over `samples_per_epoch` sequences.

        `stage_samples` are the sequences of each stage of a curriculum, None for one that takes the rest.

        Raises:
            UserError: the stages together have fewer sequences than one step takes.
        """
        declared = sum(samples or 0 for samples in stage_samples)
        is_open = not stage_samples or stage_samples[-1] is None
        if config.train_tokens == "auto":
            samples = declared + (config.epochs * samples_per_epoch if is_open else 0)
        else:
            samples = config.train_tokens / config.seq_len
        num_steps = max(1, round(samples / config.global_batch_size))
        if not is_open and num_steps * config.global_batch_size > declared:
            # There is nothing behind the last stage: what does not fill a step is left.
            num_steps = declared // config.global_batch_size
            if not num_steps:
                rule = f"have {declared:,} sequences of {config.seq_len} together, fewer than global_batch_size = "
                raise UserError(config.fault("stages", rule + f"{config.global_batch_size}", "give them more tokens"))
        return cls(
            num_steps=num_steps,
            warmup_steps=round(config.warmup_fraction * num_steps),
            global_batch_size=config.global_batch_size,
            seq_len=config.seq_len,
            samples_per_epoch=samples_per_epoch,
            lr=config.lr,
            min_lr=config.min_lr,
            shape=config.lr_schedule,
        )

    @property
    def batch_tokens(self) -> int:
        """Tokens that one step trains on."""
        return self.global_batch_size * self.seq_len

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole run trains on."""
        return self.num_steps * self.batch_tokens

    def epochs_at(self, step: int) -> float:
        """Passes over the data after `step` steps."""
        return step * self.global_batch_size / self.samples_per_epoch

    def learning_rate(self, step: int) -> float:
        """Learning rate of update `step`, counted from 1 to `num_steps`.

        Rises in a line from lr/warmup_steps to lr at step warmup_steps, then falls to min_lr at the last step:
        cosine as (1 + cos(π·t)) / 2 with t from 0 to 1 (Loshchilov and Hutter, 2017), or in a line, or stays.
        """
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.shape == "constant":
            return self.lr
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        share = (1 + math.cos(math.pi * progress)) / 2 if self.shape == "cosine" else 1 - progress
        return self.min_lr + (self.lr - self.min_lr) * share
