"""What each size of model would come to on this machine, with this corpus, in the time or the tokens that there are.

In: the speed of the machine, the tokens of the corpus, a scaling law. Out: for each size its tokens, steps, hours and
the bits per byte that it would have, and the size to take.

*Time.* A token costs a fixed time and the time of its operations: two measured sizes give both.
*Repeated text.* Tokens that are read again teach less. R further epochs of U tokens are worth
U·R*·(1 - e^(-R/R*)) fresh ones with R* = 15.4 (Muennighoff et al., 2023, arXiv 2305.16264).
*Choice.* The size with the fewest bits per byte; where a smaller one comes within half a percent, that one, which is
cheaper to use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zerokara.config.architectures import SizeName
from zerokara.forecast.law import Prediction, ScalingLaw
from zerokara.model.shapes import ModelShape

REPETITIONS_WORTH = 15.4
"""R*."""
RULE_OF_THUMB = 20
"""Tokens for each parameter where nothing better is known (Hoffmann et al., 2022)."""
MIN_TOKENS_PER_PARAMETER = 0.2
"""With fewer a model is not worth a look."""
GOOD_ENOUGH = 1.005
"""Bits per byte over the best, up to which a smaller model is taken."""


@dataclass(frozen=True)
class Speed:
    """How fast a machine trains."""

    seconds_per_token: float
    """Whatever the size."""
    seconds_per_flop: float

    @classmethod
    def of(cls, measured: Sequence[tuple[float, float]]) -> Speed:
        """The line through measured sizes: FLOPs and seconds of a token, neither of the two parts below 0."""
        flops, seconds = np.array(measured).T
        if len(measured) == 1:
            return cls(0.0, float(seconds[0] / flops[0]))
        # Of relative errors, or the largest size alone would count.
        design = np.stack([np.ones_like(flops), flops], axis=1) / seconds[:, None]
        fixed, per_flop = np.linalg.lstsq(design, np.ones(len(measured)), rcond=None)[0]
        if per_flop <= 0:
            return cls(float(seconds.mean()), 0.0)
        return (
            cls(float(fixed), float(per_flop))
            if fixed >= 0
            else cls(0.0, float(np.exp(np.log(seconds / flops).mean())))
        )

    def seconds_of_token(self, shape: ModelShape) -> float:
        """Seconds to train on one token."""
        return self.seconds_per_token + self.seconds_per_flop * shape.flops_per_token()


@dataclass(frozen=True)
class Budget:
    """What there is."""

    hours: float
    """Of training; infinite where the tokens are the limit."""
    tokens: float
    """Of training; infinite where the hours are the limit."""
    unique_tokens: float
    """Of the corpus."""
    max_epochs: float


@dataclass(frozen=True)
class Memory:
    """What a size takes of the memory in which it is computed: of one GPU, or of a machine without any."""

    num_bytes: float
    fits: bool


@dataclass(frozen=True)
class Candidate:
    """A size, and what it would come to."""

    name: SizeName
    shape: ModelShape
    tokens: float
    epochs: float
    hours: float
    prediction: Prediction | None
    """None where there is no law."""
    memory: Memory

    @property
    def fits(self) -> bool:
        """Into the memory of the machine."""
        return self.memory.fits

    @property
    def tokens_per_parameter(self) -> float:
        """Of fresh tokens' worth."""
        return fresh_worth(self.tokens, self.tokens / self.epochs) / self.shape.num_parameters()

    @property
    def is_sensible(self) -> bool:
        """Whether anybody would consider it."""
        return self.fits and self.tokens_per_parameter >= MIN_TOKENS_PER_PARAMETER


def effective_parameters(shape: ModelShape) -> float:
    """N of the scaling law: what a token is multiplied with, the output projection and attention scores included."""
    return shape.flops_per_token() / 6


def fresh_worth(tokens: float, unique_tokens: float) -> float:
    """Fresh tokens that would teach as much as these, of which some are read again."""
    repetitions = tokens / unique_tokens - 1
    if repetitions <= 0:
        return tokens
    return unique_tokens * (1 + REPETITIONS_WORTH * (1 - math.exp(-repetitions / REPETITIONS_WORTH)))


def candidate(
    name: SizeName, shape: ModelShape, memory: Memory, speed: Speed, budget: Budget, law: ScalingLaw | None
) -> Candidate:
    """What a size would come to."""
    seconds = speed.seconds_of_token(shape)
    tokens = min(budget.hours * 3600 / seconds, budget.tokens, budget.max_epochs * budget.unique_tokens)
    worth = fresh_worth(tokens, budget.unique_tokens)
    prediction = None if law is None else law.predict(effective_parameters(shape), worth)
    return Candidate(name, shape, tokens, tokens / budget.unique_tokens, tokens * seconds / 3600, prediction, memory)


def recommended(candidates: Sequence[Candidate]) -> Candidate | None:
    """The size to take, of candidates from the smallest to the largest; None where none fits.

    So far from any run as one with hardly a token for each parameter, no law is to be believed.

    Without predictions it is the largest with about 20 tokens for each parameter, or else the smallest.
    """
    fitting = [each for each in candidates if each.is_sensible] or [each for each in candidates if each.fits][:1]
    values = {each.name: each.prediction.value for each in fitting if each.prediction}
    if not values:
        ample = [each for each in fitting if each.tokens_per_parameter >= RULE_OF_THUMB]
        return (ample[-1] if ample else fitting[0]) if fitting else None
    best = min(values.values())
    return next(each for each in fitting if values[each.name] <= GOOD_ENOUGH * best)
