"""A scaling law: the bits per byte of a model, from its parameters and the tokens it was trained on.

    L(N, D) = E + (A·N^(-α/γ) + B·D^(-β/γ))^γ          (Busbridge et al., 2025, arXiv 2502.08606)

In: measured runs. Out: a prediction for another size and length, with an interval.

*Form.* With γ = 1 it is the sum of Hoffmann et al. (2022, arXiv 2203.15556); the smaller γ, the more the worse of the
two terms decides, as in Kaplan et al. (2020, arXiv 2001.08361, equation 1.5): a larger model gains little until it has
seen enough. Small runs are just there, and their sizes and lengths do not add up: a sum misses them by 0.6 %, γ = 0.2
by 0.2 %, less than a seed makes (docs/recipe.md). With much of one of N and D, L - E falls as the other's -α or -β.

*Fit.* With E, α, β and γ fixed, (L - E)^(1/γ) is linear in A and B; so for each point of a grid of the four these two
are found exactly, by least squares of the relative error with neither below 0, and there are no local minima to start
in. The few runs that a user can afford tell slopes and little more, so weak priors hold the rest: α and β near what
large models have (Besiroglu et al., 2024, arXiv 2404.10102, found 0.35 and 0.37), and E near a third of what the best
small run reached. Without the second the first would take most of the loss of a small model for irreducible.

*Interval.* Points of the grid are drawn as often as runs and priors make them likely, with the noise between seeds as
the least error of a run. It covers what the runs leave open, and by BEND that small runs are not quite what larger
ones are.

Shape suffixes: P runs, G points of the grid, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

PRIOR_EXPONENT, EXPONENT_WIDTH = 0.3, 0.15
"""Mean and standard deviation of what α and β are taken to be before any run."""
PRIOR_FLOOR, FLOOR_WIDTH = 0.35, 0.15
"""The same of E, as a share of the fewest bits per byte of any run: 0.6 of 1.7, as E is for English text and tokens of
four bytes in Hoffmann et al."""
SEED_NOISE = 0.003
"""Standard deviation of the relative error of a run, from its seed alone."""
BEND = 0.02
"""Standard deviation of the relative error of a law for one doubling of size or length beyond the small runs; for more
it grows as their square root. Of the few runs that it was checked on (docs/recipe.md)."""
NUM_DRAWS = 1000
_EXPONENTS = np.arange(0.05, 0.9001, 0.025)
_FLOORS = np.arange(0.02, 0.9001, 0.04)
"""E as a share of the fewest bits per byte."""
_GAMMAS = np.array([1, 0.7, 0.5, 0.35, 0.25, 0.2, 0.15])
_UNIT_N, _UNIT_D = 1e6, 1e7
"""The scale of N and D inside the fit, for numbers near 1."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run that was trained to its end."""

    parameters: float
    """N: all that a token is multiplied with, the output projection included, embedding look-ups not."""
    tokens: float
    """D."""
    bits_per_byte: float


@dataclass(frozen=True)
class Prediction:
    """Bits per byte, with an interval of 95 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted law."""

    drawn: Numbers
    """E, A, B, α, β and γ of each draw, for N in millions and D in tens of millions: [6, R]."""
    noise: float
    """Standard deviation of the relative error of a single run."""
    largest: tuple[float, float]
    """N and D, each of the run that has most of it."""

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """The bits per byte of a run: half of the draws are below."""
        values_R = _evaluate(self.drawn, parameters, tokens)
        beyond = max(parameters / self.largest[0], tokens / self.largest[1], 1.0)
        spread = math.hypot(self.noise, BEND * math.sqrt(math.log2(beyond)))
        chance_R = np.random.default_rng(0).normal(1, spread, NUM_DRAWS)
        value = float(np.median(values_R))
        low, high = np.quantile(values_R * chance_R, [0.025, 0.975])
        return Prediction(value, min(value, float(low)), max(value, float(high)))

    @property
    def floor(self) -> float:
        """E: what would be left with any number of parameters and tokens; hardly known from small runs."""
        return float(np.median(self.drawn[0]))


def fit(runs: Sequence[MeasuredRun], seed: int = 0) -> ScalingLaw:
    """Fit the law to three runs or more, of different sizes and lengths."""
    assert len(runs) >= 3, f"{len(runs)} runs do not make a law"
    parameters_P, tokens_P, values_P = np.array([(run.parameters, run.tokens, run.bits_per_byte) for run in runs]).T
    laws_6G, prior_G = _grid(parameters_P, tokens_P, values_P)
    squares_G = ((_evaluate(laws_6G[..., None], parameters_P, tokens_P) / values_P - 1) ** 2).sum(axis=1)
    best = (squares_G / SEED_NOISE**2 + prior_G).argmin()
    # As many numbers as were fitted are no longer free to differ; the priors stand for three of the six.
    noise = max(SEED_NOISE, math.sqrt(squares_G[best] / max(1, len(runs) - 3)))
    cost_G = squares_G / noise**2 + prior_G
    chance_G = np.exp((cost_G.min() - cost_G) / 2)
    places_R = np.random.default_rng(seed).choice(len(cost_G), NUM_DRAWS, p=chance_G / chance_G.sum())
    return ScalingLaw(laws_6G[:, places_R], noise, (float(parameters_P.max()), float(tokens_P.max())))


def _grid(parameters_P: Numbers, tokens_P: Numbers, values_P: Numbers) -> tuple[Numbers, Numbers]:
    """Laws with the best A and B for each of the other four, [6, G]; how unlikely they are before any run, [G]."""
    every = np.meshgrid(_FLOORS, _EXPONENTS, _EXPONENTS, _GAMMAS, indexing="ij")
    share_G, alpha_G, beta_G, gamma_G = (each.ravel() for each in every)
    floor_G = share_G * values_P.min()
    rest_GP, gamma_G1 = values_P - floor_G[:, None], gamma_G[:, None]
    # (L - E)^(1/γ) = A·n + B·d. An error of the left side times this weight is a relative error of L.
    weight_GP = gamma_G1 * rest_GP ** (1 - 1 / gamma_G1) / values_P
    target_GP = gamma_G1 * rest_GP / values_P
    n_GP = (parameters_P / _UNIT_N) ** (-alpha_G[:, None] / gamma_G1) * weight_GP
    d_GP = (tokens_P / _UNIT_D) ** (-beta_G[:, None] / gamma_G1) * weight_GP
    a_G, b_G = _least_squares(n_GP, d_GP, target_GP)
    prior_G = ((share_G - PRIOR_FLOOR) / FLOOR_WIDTH) ** 2
    prior_G += ((alpha_G - PRIOR_EXPONENT) / EXPONENT_WIDTH) ** 2 + ((beta_G - PRIOR_EXPONENT) / EXPONENT_WIDTH) ** 2
    return np.stack([floor_G, a_G, b_G, alpha_G, beta_G, gamma_G]), prior_G


def _least_squares(x_GP: Numbers, y_GP: Numbers, target_GP: Numbers) -> tuple[Numbers, Numbers]:
    """A and B of A·x + B·y nearest to the target, neither below 0, [G] each."""
    xx, yy, xy = (np.einsum("gp,gp->g", *pair) for pair in ((x_GP, x_GP), (y_GP, y_GP), (x_GP, y_GP)))
    xt, yt = np.einsum("gp,gp->g", x_GP, target_GP), np.einsum("gp,gp->g", y_GP, target_GP)
    determinant = np.maximum(xx * yy - xy**2, 1e-12 * xx * yy)
    a, b = (yy * xt - xy * yt) / determinant, (xx * yt - xy * xt) / determinant
    # Where one is below 0, the best without it; targets are above 0, so then the other is.
    return np.where(b < 0, xt / xx, np.maximum(a, 0)), np.where(a < 0, yt / yy, np.maximum(b, 0))


def _evaluate(laws: Numbers, parameters: float | Numbers, tokens: float | Numbers) -> Numbers:
    """L(N, D) of laws [6, ...]."""
    e, a, b, alpha, beta, gamma = laws
    sizes, lengths = (parameters / _UNIT_N) ** (-alpha / gamma), (tokens / _UNIT_D) ** (-beta / gamma)
    return np.asarray(e + (a * sizes + b * lengths) ** gamma)
