"""Which small runs to fit a scaling law on, in the minutes that there are.

Three neighbouring sizes, each trained on three lengths of which the next is twice as long: nine runs, whose learning
rate falls to its end in every one of them (a longer run on its way is no shorter run). More minutes first make the runs
longer, then the sizes larger: a law is told the more of, the nearer its runs are to what it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerokara.config.model_settings import ModelSettings
from zerokara.forecast.sizes import Speed
from zerokara.model.shapes import ModelShape

START_SECONDS = 8.0
"""Of a run: from its start to its first step, and from its last to its end."""
MAX_EVAL_TOKENS = 50_000
"""Of its validation."""
_FORWARD_SHARE = 1 / 3
"""Of a training step; a validation reads most tokens twice, in windows that overlap."""
_VALIDATION = 2 * _FORWARD_SHARE * MAX_EVAL_TOKENS
"""Tokens of training that would take as long as the validation."""
LENGTHS = (1, 2, 4)
NUM_SIZES = 3
MIN_TOKENS_PER_PARAMETER = 5
"""Of the largest size in its longest run, for sizes to be any larger."""
MIN_STEPS = 50
"""Of the shortest run: fewer tell nothing of a schedule."""
MIN_BATCH = 8
"""Sequences of the smallest batch (`recipe`)."""

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

    def seconds(self, speed: Speed) -> float:
        """From its start to its end."""
        return START_SECONDS + (self.tokens + _VALIDATION) * speed.seconds_of_token(self.shape)


def shapes(config: ModelSettings, vocab_size: int) -> list[ModelShape]:
    """The shapes of `TINY` for a configuration's architecture, sequence length and tokenizer."""
    return [ModelShape.from_config(config.model_copy(update=each), vocab_size) for each in TINY]


def min_tokens(sizes: Sequence[ModelShape]) -> int:
    """Tokens that a corpus must have for any runs: the longest reads so many, each once."""
    return MIN_STEPS * MIN_BATCH * sizes[0].raw_len * LENGTHS[-1]


def climb(sizes: Sequence[ModelShape], speed: Speed, seconds: float, unique_tokens: float) -> list[Rung]:
    """The runs, the cheapest first; empty where the time is too short for any. `sizes` are those of `shapes`."""
    for first in reversed(range(len(sizes) - NUM_SIZES + 1)):
        some = range(first, first + NUM_SIZES)
        of_tokens = sum(speed.seconds_of_token(sizes[each]) for each in some)  # one of each size
        fixed = START_SECONDS * NUM_SIZES + _VALIDATION * of_tokens  # for each length
        shortest = (seconds - fixed * len(LENGTHS)) / (of_tokens * sum(LENGTHS))
        shortest = min(shortest, unique_tokens / LENGTHS[-1])  # a repeated token is worth less than a fresh one
        largest = sizes[some[-1]]
        is_long = shortest * LENGTHS[-1] >= MIN_TOKENS_PER_PARAMETER * largest.num_parameters()
        if shortest * LENGTHS[-1] >= min_tokens(sizes) and (is_long or not first):
            rungs = [Rung(TINY[each], sizes[each], round(shortest * length)) for each in some for length in LENGTHS]
            return sorted(rungs, key=lambda rung: rung.tokens * speed.seconds_of_token(rung.shape))
    return []
