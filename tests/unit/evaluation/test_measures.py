"""Intervals hold the truth as often as they say, on simulated documents."""

from __future__ import annotations

import numpy as np
import pytest

from zerokara.evaluation import scoring as measures
from zerokara.evaluation.scoring import share, wilson

TRIALS = 300
STRAY = 3 * (0.05 * 0.95 / TRIALS) ** 0.5
"""Three standard errors of a share of 95 % found in so many trials."""


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "NUM_RESAMPLES", 400)


def documents(random: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Bits and bytes of documents that differ in length and in difficulty; the true ratio is 2."""
    lengths = random.integers(50, 500, num)
    return lengths * random.gamma(8, 2 / 8, num), lengths


def test_an_interval_over_documents_holds_the_truth() -> None:
    random = np.random.default_rng(1)
    held = 0
    for trial in range(TRIALS):
        bits, lengths = documents(random, 60)
        found = share("x", bits, lengths).interval(trial)
        assert found is not None
        held += found.low <= 2 <= found.high
    assert abs(held / TRIALS - 0.95) < STRAY


def test_tokens_taken_for_documents_would_not() -> None:
    """The broken twin: each document's tokens resampled one by one, as if they told ten times as much."""
    random = np.random.default_rng(1)
    held = 0
    for trial in range(TRIALS):
        bits, lengths = documents(random, 60)
        found = share("x", np.repeat(bits / 10, 10), np.repeat(lengths / 10, 10)).interval(trial)
        assert found is not None
        held += found.low <= 2 <= found.high
    assert held / TRIALS < 0.6


def test_a_paired_difference_is_narrower_and_holds_the_truth() -> None:
    random = np.random.default_rng(2)
    held = 0
    widths = []
    for trial in range(TRIALS):
        bits, lengths = documents(random, 60)
        better = bits - lengths * random.normal(0.05, 0.1, 60)
        paired = share("x", bits, lengths).difference(share("x", better, lengths), trial)
        alone = share("x", bits, lengths).interval(trial)
        assert paired is not None and alone is not None
        held += paired.low <= 0.05 <= paired.high
        widths.append((paired.high - paired.low) / (alone.high - alone.low))
    assert abs(held / TRIALS - 0.95) < STRAY
    assert np.mean(widths) < 0.25


def test_the_same_seed_gives_the_same_interval() -> None:
    bits, lengths = documents(np.random.default_rng(3), 40)
    whole = share("x", bits, lengths).interval(5)
    assert share("x", bits, lengths).interval(5) == whole
    assert share("x", bits, lengths).interval(6) != whole


def test_wilson_is_the_published_interval() -> None:
    # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    for right, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = wilson(right, n)
        assert found.low == pytest.approx(low, abs=6e-5) and found.high == pytest.approx(high, abs=6e-5)
    assert wilson(20, 20).high == 1


def test_what_has_no_interval() -> None:
    assert share("x", [3.0], [2.0]).interval(1) is None
    assert share("x", [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]).interval(1) is None, "no words at all"
    with pytest.raises(ValueError, match="5 of 4"):
        wilson(5, 4)


def test_the_interval_of_a_mean_is_the_known_one() -> None:
    values = np.random.default_rng(1).normal(5, 1, 400)
    found = share("x", values, np.ones(400)).interval(3)
    assert found is not None
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.15)
    assert (found.high + found.low) / 2 == pytest.approx(values.mean(), abs=0.02)
