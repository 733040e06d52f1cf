"""Which small runs to fit a scaling law on, in the minutes that there are.

Three neighbouring sizes, each trained on three lengths of which the next is twice as long: nine runs, whose learning
rate falls to its end in every one of them (a longer run on its way is no shorter run). More minutes first make the runs
longer, then the sizes larger: a law is told the more of, the nearer its runs are to what it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.forecast.seats import makespan
from zerokara.forecast.sizes import Speed
from zerokara.model.shapes import ModelShape
from zerokara.training.planning import recipe

START_SECONDS = 8.0
"""Of a run: from its start to its first step, and from its last to its end."""
MAX_EVAL_TOKENS = 200_000
"""Of its validation, which should be that of a run of step 3: another part of the text has other bits per byte."""
_EVAL_SHARE = 2 / 3
"""Of the time of training on them, for tokens of a validation: no backward pass, but windows that overlap by half."""
LENGTHS = (1, 2, 4)
NUM_SIZES = 3
MIN_TOKENS_PER_PARAMETER = 5
"""Of the largest size in its longest run, for sizes to be any larger."""
MIN_STEPS = 400
"""Of the shortest run: in fewer a model hardly gets beyond the frequencies of words, and no law holds."""
MIN_BATCH = 4
"""Sequences of the smallest batch."""

TINY: tuple[dict[str, Any], ...] = tuple(
    {
        "model_size": "",
        "num_layers": layers,
        "hidden_size": width,
        "num_attn_heads": width // 32,
        "num_kv_heads": "auto",
        "head_dim": "auto",
        "ffn_hidden_size": "auto",
    }
    for layers, width in ((2, 64), (3, 96), (4, 128), (4, 192), (4, 256), (6, 320), (6, 448))
)
"""Settings of the sizes, from the smallest to the largest."""


@dataclass(frozen=True)
class Rung:
    """A run to train."""

    settings: dict[str, Any]
    """Those of its size."""
    shape: ModelShape
    tokens: int
    eval_tokens: int
    """At most, of its validation."""

    @property
    def batch(self) -> int:
        """Sequences in a step: as many as the recipe asks for, and not the power of two that it takes. Doubled between
        two small runs, or between them and the run that is planned, the batch would put a kink into their law."""
        return max(MIN_BATCH, round(recipe.batch_tokens(self.tokens) / self.shape.raw_len))

    def seconds(self, speed: Speed) -> float:
        """From its start to its end."""
        return START_SECONDS + (self.tokens + _EVAL_SHARE * self.eval_tokens) * speed.seconds_of_token(self.shape)


def shapes(config: PretrainConfig, vocab_size: int) -> list[ModelShape]:
    """The shapes of `TINY` for a configuration's architecture, sequence length and tokenizer."""
    return [ModelShape.from_config(config.model_copy(update=each), vocab_size) for each in TINY]


def eval_tokens(config: PretrainConfig, num_valid_tokens: int) -> int:
    """Tokens of a small run's validation: as many as of a run's, but for the time they would take."""
    wanted = num_valid_tokens if config.eval_tokens == "all" else config.eval_tokens
    return min(wanted, num_valid_tokens, MAX_EVAL_TOKENS)


def min_tokens(sizes: Sequence[ModelShape]) -> int:
    """Tokens that a corpus must have for any runs: the longest reads so many, each once."""
    return MIN_STEPS * MIN_BATCH * sizes[0].raw_len * LENGTHS[-1]


@dataclass(frozen=True)
class Means:
    """What the small runs may take."""

    seconds: float
    num_seats: int
    """Runs at a time."""
    unique_tokens: float
    """Of the corpus: a repeated token is worth less than a fresh one, so none is read twice."""
    eval_tokens: int
    """Of a validation."""


def climb(sizes: Sequence[ModelShape], speed: Speed, means: Means) -> list[Rung]:
    """The runs, the costliest first; empty where there is too little for any. `sizes` are those of `shapes`."""
    for first in reversed(range(len(sizes) - NUM_SIZES + 1)):
        rungs = _longest(range(first, first + NUM_SIZES), sizes, speed, means)
        most = rungs[0].tokens
        is_long = most >= MIN_TOKENS_PER_PARAMETER * sizes[first + NUM_SIZES - 1].num_parameters()
        if most >= min_tokens(sizes) and (is_long or not first):
            return rungs
    return []


def least_seconds(sizes: Sequence[ModelShape], speed: Speed, means: Means) -> float:
    """What the shortest runs of the smallest sizes would take."""
    rungs = _made(range(NUM_SIZES), sizes, min_tokens(sizes) / LENGTHS[-1], means)
    return makespan([rung.seconds(speed) for rung in rungs], means.num_seats)


def _made(some: range, sizes: Sequence[ModelShape], shortest: float, means: Means) -> list[Rung]:
    tokens = [round(shortest * length) for length in reversed(LENGTHS)]
    return [Rung(TINY[each], sizes[each], count, means.eval_tokens) for count in tokens for each in reversed(some)]


def _longest(some: range, sizes: Sequence[ModelShape], speed: Speed, means: Means) -> list[Rung]:
    """The runs of these sizes, as long as the means allow."""

    def fits(shortest: float) -> bool:
        rungs = _made(some, sizes, shortest, means)
        return makespan([rung.seconds(speed) for rung in rungs], means.num_seats) <= means.seconds

    low, high = 0.0, means.unique_tokens / LENGTHS[-1]
    if fits(high):
        return _made(some, sizes, high, means)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return _made(some, sizes, low, means)
