"""Tokens, time and expected loss of each model size, on this machine, with this corpus, in given hours or tokens.

In: the speed of the machine, the tokens of the corpus, a scaling law. Out: for each size its tokens, hours and expected
bits per byte, and the size to take: that with the fewest, or a smaller one within half a percent of it.

Tokens that are read again teach less: R further epochs of U tokens are worth U·R*·(1 - e^(-R/R*)) fresh ones with
R* = 15.4 (Muennighoff et al., 2023, arXiv 2305.16264).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerokara.config.architectures import SizeName
from zerokara.forecast.fit import Prediction, ScalingLaw, effective_parameters
from zerokara.forecast.speed import Speed
from zerokara.model.shapes import ModelShape
from zerokara.progress import bytes_text, count_text, seconds_text

REPETITIONS_WORTH = 15.4  # R*
RULE_OF_THUMB = 20  # tokens per parameter where nothing better is known (Hoffmann et al., 2022)
MIN_TOKENS_PER_PARAMETER = 0.2  # sizes with fewer are not shown
GOOD_ENOUGH = 1.005  # ratio to the fewest bits per byte, up to which a smaller model is taken: it is cheaper to use


@dataclass(frozen=True)
class Candidate:
    """The run of one size: tokens, hours, memory and expected loss."""

    name: SizeName
    shape: ModelShape
    tokens: float
    epochs: float
    hours: float
    prediction: Prediction | None
    """None where there is no law."""
    memory_bytes: float
    fits: bool

    @property
    def tokens_per_parameter(self) -> float:
        """Fresh tokens per parameter; repeated ones count for what they are worth."""
        return fresh_worth(self.tokens, self.tokens / self.epochs) / self.shape.num_parameters()

    @property
    def is_sensible(self) -> bool:
        """True if it fits, and has tokens enough to be shown."""
        return self.fits and self.tokens_per_parameter >= MIN_TOKENS_PER_PARAMETER


def fresh_worth(tokens: float, unique_tokens: float) -> float:
    """Return the number of fresh tokens that would teach as much as these, of which some are read again."""
    repetitions = tokens / unique_tokens - 1
    if repetitions <= 0:
        return tokens
    return unique_tokens * (1 + REPETITIONS_WORTH * (1 - math.exp(-repetitions / REPETITIONS_WORTH)))


def candidate(
    name: SizeName,
    shape: ModelShape,
    memory: tuple[float, bool],
    speed: Speed,
    law: ScalingLaw | None,
    limits: tuple[float, float],
    unique_tokens: float,
) -> Candidate:
    """Return the run of a size within `limits`, hours and tokens (either may be infinite), on a corpus of so many."""
    seconds = speed.seconds_of_token(shape)
    tokens = min(limits[0] * 3600 / seconds, limits[1])
    worth = fresh_worth(tokens, unique_tokens)
    prediction = None if law is None else law.predict(effective_parameters(shape), worth)
    return Candidate(name, shape, tokens, tokens / unique_tokens, tokens * seconds / 3600, prediction, *memory)


def recommended(candidates: Sequence[Candidate]) -> Candidate | None:
    """Choose a size from candidates in ascending order; None where none fits."""
    # With hardly a token for each parameter, so far from any run, no law is to be believed.
    fitting = [each for each in candidates if each.is_sensible] or [each for each in candidates if each.fits][:1]
    values = {each.name: each.prediction.value for each in fitting if each.prediction}
    if not values:  # the largest with about 20 tokens for each parameter, or else the smallest
        ample = [each for each in fitting if each.tokens_per_parameter >= RULE_OF_THUMB]
        return (ample[-1] if ample else fitting[0]) if fitting else None
    best = min(values.values())
    return next(each for each in fitting if values[each.name] <= GOOD_ENOUGH * best)


def table(shown: Mapping[Candidate, int], chosen: Candidate) -> list[str]:
    """Format the table: each size with its optimizer steps."""
    last = "bits per byte (95 %)" if chosen.prediction else "tokens a parameter"
    columns = f"{'parameters':>10} {'tokens':>8} {'epochs':>7} {'steps':>9} {'memory':>9} {'time':>14}"
    lines = [f"  {'size':<6} {columns}  {last}"]
    for each, steps in shown.items():
        lines.append(
            f"{'→' if each is chosen else ' '} {each.name:<6} {count_text(each.shape.num_parameters()):>10} "
            f"{count_text(each.tokens):>8} {each.epochs:>7.2f} {steps:>9,} {bytes_text(each.memory_bytes):>9} "
            f"{seconds_text(3600 * each.hours):>14}  {each.prediction or f'{each.tokens_per_parameter:.1f}'}"
        )
    return lines
