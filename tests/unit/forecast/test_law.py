from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from zerokara.forecast.law import MeasuredRun, fit

SIZES, LENGTHS = (0.4e6, 1e6, 3e6), (4e6, 12e6, 40e6)


def truth(parameters: float, tokens: float) -> float:
    """A law of the usual form, other than the prior's exponents, in bits per byte."""
    return 0.62 + 0.55 * (parameters / 1e6) ** -0.31 + 0.42 * (tokens / 1e7) ** -0.42


def bottleneck(parameters: float, tokens: float) -> float:
    """A law in which the worse of the two terms decides."""
    return 0.55 + (0.45 * (parameters / 1e6) ** (-0.3 / 0.2) + 0.6 * (tokens / 1e7) ** (-0.25 / 0.2)) ** 0.2


def runs(noise: float, seed: int = 0, of: Callable[[float, float], float] = truth) -> list[MeasuredRun]:
    chance = np.random.default_rng(seed)
    return [
        MeasuredRun(size, length, of(size, length) * chance.normal(1, noise)) for size in SIZES for length in LENGTHS
    ]


def test_a_law_is_found_again() -> None:
    law = fit(runs(noise=0))
    for size in (*SIZES, 12e6):
        for length in (*LENGTHS, 160e6):
            assert law.predict(size, length).value == pytest.approx(truth(size, length), rel=0.01)
    assert law.noise == pytest.approx(0.003)


def test_a_law_is_found_in_which_a_larger_model_gains_only_with_more_text() -> None:
    """As small runs have it: no sum of a term of the size and one of the length comes near it."""
    law = fit(runs(noise=0, of=bottleneck))
    for size in (*SIZES, 12e6):
        for length in (*LENGTHS, 160e6):
            assert law.predict(size, length).value == pytest.approx(bottleneck(size, length), rel=0.01)
    gains = [bottleneck(0.4e6, length) - bottleneck(3e6, length) for length in LENGTHS]
    assert gains[-1] > 2 * gains[0]  # in a sum they would be equal
    found = [law.predict(0.4e6, length).value - law.predict(3e6, length).value for length in LENGTHS]
    assert found == pytest.approx(gains, rel=0.05)


def test_four_times_as_large_is_told_within_three_percent_and_the_interval_holds_it() -> None:
    """In noisy runs, whatever the noise; about one in twenty lies outside of its interval."""
    held = []
    for seed in range(10):
        predicted = fit(runs(noise=0.005, seed=seed)).predict(12e6, 160e6)
        assert predicted.value == pytest.approx(truth(12e6, 160e6), rel=0.06)
        assert predicted.low < predicted.value < predicted.high
        held.append(predicted.low <= truth(12e6, 160e6) <= predicted.high)
    assert sum(held) >= 8


def test_more_of_anything_never_costs_bits() -> None:
    law = fit(runs(noise=0.02, seed=3))
    values = [law.predict(size, 1e7).value for size in (1e5, 1e6, 1e7, 1e9)]
    assert values == sorted(values, reverse=True) and law.floor >= 0
    values = [law.predict(1e6, length).value for length in (1e6, 1e7, 1e8, 1e12)]
    assert values == sorted(values, reverse=True)


def test_further_from_the_runs_less_is_known() -> None:
    law = fit(runs(noise=0.005))
    near, far = (law.predict(*place) for place in ((2e6, 2e7), (1e9, 2e10)))
    assert (far.high - far.low) / far.value > 2 * (near.high - near.low) / near.value


def test_three_runs_are_enough_and_two_are_none() -> None:
    few = [MeasuredRun(size, length, truth(size, length)) for size, length in ((4e5, 4e6), (1e6, 12e6), (3e6, 40e6))]
    assert fit(few).predict(12e6, 160e6).value == pytest.approx(truth(12e6, 160e6), rel=0.1)
    with pytest.raises(AssertionError, match="2 runs"):
        fit(few[:2])
