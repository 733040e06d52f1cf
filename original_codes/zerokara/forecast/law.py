"""A scaling law: the bits per byte of a model, from its parameters and the tokens it was trained on.

    L(N, D) = E + A·N^-α + B·D^-β        (Hoffmann et al., 2022, arXiv 2203.15556, approach 3)

In: measured runs. Out: a prediction for another size and length, with an interval.

*Fit.* With α and β fixed, L is linear in E, A and B; so for each pair of a grid the other three are found exactly, by
least squares of the relative error with none of them below 0 (variable projection, which has no local minima to start
in). The few runs that a user can afford tell slopes and little more, so weak priors hold the rest: α and β near what
large models have (Besiroglu et al., 2024, arXiv 2404.10102, found 0.35 and 0.37), and E near a third of what the best
small run reached. Without the second the first would take most of the loss of a small model for irreducible.

*Interval.* The fit is repeated on resampled residuals, none of which is taken as smaller than the noise between seeds.
It covers the noise of the runs, and not that a law may bend beyond them.

Shape suffixes: P runs (and the prior of E), G pairs of exponents, U subsets of the three coefficients, R resamplings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

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
NUM_RESAMPLINGS = 400
_EXPONENTS = np.arange(0.1, 0.9001, 0.025)
_SUBSETS = [list(each) for each in product([False, True], repeat=3) if any(each)]
"""Which of E, A and B are above 0."""
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


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted law."""

    coefficients: Numbers
    """E, A and B for N in millions and D in tens of millions, α and β: [5]."""
    resampled: Numbers
    """The same of each resampling, [R, 5]."""
    noise: float
    """Standard deviation of the relative error of a single run."""

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """The bits per byte of a run."""
        value = float(_evaluate(self.coefficients, parameters, tokens))
        chance = np.random.default_rng(0).normal(1, self.noise, len(self.resampled))
        low, high = np.quantile(_evaluate(self.resampled.T, parameters, tokens) * chance, [0.025, 0.975])
        return Prediction(value, min(value, float(low)), max(value, float(high)))

    @property
    def floor(self) -> float:
        """E: what would be left with any number of parameters and tokens; hardly known from small runs."""
        return float(self.coefficients[0])


def fit(runs: Sequence[MeasuredRun], seed: int = 0) -> ScalingLaw:
    """Fit the law to three runs or more, of different sizes and lengths."""
    assert len(runs) >= 3, f"{len(runs)} runs do not make a law"
    parameters, tokens, values = np.array([(run.parameters, run.tokens, run.bits_per_byte) for run in runs]).T
    solver = _Solver(parameters, tokens, values)
    ones_P1 = np.ones((len(runs), 1))
    coefficients = solver.solve(ones_P1)[0]
    errors_P = _evaluate(coefficients, parameters, tokens) / values - 1
    # As many numbers as were fitted are no longer free to differ; the prior stands for two of the five.
    free = max(1, len(runs) - 3)
    noise = max(SEED_NOISE, float(np.sqrt((errors_P**2).sum() / free)))
    drawn_PR = np.random.default_rng(seed).normal(1, noise, (len(runs), NUM_RESAMPLINGS))
    return ScalingLaw(coefficients, solver.solve(drawn_PR), noise)


class _Solver:
    """Least squares for each pair of exponents, made once for any targets."""

    def __init__(self, parameters: Numbers, tokens: Numbers, values: Numbers):
        self._pairs_G2 = np.array(list(product(_EXPONENTS, _EXPONENTS)))
        alpha_G1, beta_G1 = self._pairs_G2[:, :1], self._pairs_G2[:, 1:]
        terms = [np.ones((len(self._pairs_G2), len(values))), (parameters / _UNIT_N) ** -alpha_G1]
        terms.append((tokens / _UNIT_D) ** -beta_G1)
        # Divided by the measured values: the targets are 1, and errors are relative. The prior of E is one run more.
        runs_GP3 = np.stack(terms, axis=-1) / values[:, None]
        weight = SEED_NOISE / (FLOOR_WIDTH * values.min())
        floor_G13 = np.tile([weight, 0.0, 0.0], (len(runs_GP3), 1, 1))
        self._design_GP3 = np.concatenate([runs_GP3, floor_G13], axis=1)
        self._floor_target = weight * PRIOR_FLOOR * values.min()
        distance_G = ((self._pairs_G2 - PRIOR_EXPONENT) / EXPONENT_WIDTH) ** 2
        self._penalty_G = distance_G.sum(axis=1) * SEED_NOISE**2
        self._inverses = [np.linalg.pinv(self._design_GP3[:, :, subset]) for subset in _SUBSETS]

    def solve(self, targets_PR: Numbers) -> Numbers:
        """The coefficients for each column of targets over measured values, [R, 5]."""
        targets_PR = np.vstack([targets_PR, np.full(targets_PR.shape[1], self._floor_target)])
        found: list[tuple[Numbers, Numbers]] = []
        for subset, inverse_GUP in zip(_SUBSETS, self._inverses, strict=True):
            some_GUR = inverse_GUP @ targets_PR
            errors_GPR = self._design_GP3[:, :, subset] @ some_GUR - targets_PR
            cost_GR = (errors_GPR**2).sum(axis=1) + self._penalty_G[:, None]
            cost_GR[(some_GUR < 0).any(axis=1)] = np.inf
            all_G3R = np.zeros((len(some_GUR), 3, targets_PR.shape[1]))
            all_G3R[:, subset] = some_GUR
            best_R = cost_GR.argmin(axis=0)
            columns_R = np.arange(targets_PR.shape[1])
            chosen_R5 = np.hstack([all_G3R[best_R, :, columns_R], self._pairs_G2[best_R]])
            found.append((cost_GR[best_R, columns_R], chosen_R5))
        costs_UR = np.stack([cost for cost, _ in found])
        chosen_UR5 = np.stack([chosen for _, chosen in found])
        return np.asarray(chosen_UR5[costs_UR.argmin(axis=0), np.arange(targets_PR.shape[1])])


def _evaluate(coefficients: Numbers, parameters: float | Numbers, tokens: float | Numbers) -> Numbers:
    """L(N, D)."""
    e, a, b, alpha, beta = coefficients
    return np.asarray(e + a * (parameters / _UNIT_N) ** -alpha + b * (tokens / _UNIT_D) ** -beta)
