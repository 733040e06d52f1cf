from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from token_sources import sample_at

from zerokara.samples.order import KeyedPermutation, SampleOrder, mix


def test_mix_is_splitmix64() -> None:
    """The first outputs of the published generator for seed 1234567 (state advanced by the golden ratio each time)."""
    golden = 0x9E3779B97F4A7C15
    outputs = [mix(1234567 + (k + 1) * golden) for k in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 4097, 65_537])
def test_permutation_reaches_everything_once(n: int) -> None:
    for seed, epoch in ((0, 0), (1234, 7), (-5, 2)):
        image = KeyedPermutation(n, seed, epoch).at(np.arange(n))
        assert image.dtype == np.int64
        assert np.array_equal(np.sort(image), np.arange(n))


def test_a_point_of_a_huge_permutation_costs_nothing() -> None:
    """10^15 samples, and no array of that length."""
    n = 10**15
    image = KeyedPermutation(n, seed=1).at(np.array([0, 1, n - 1]))
    assert len(set(image.tolist())) == 3 and image.min() >= 0 and image.max() < n


def test_every_permutation_of_a_small_set_comes_about_equally_often() -> None:
    counts = Counter(tuple(KeyedPermutation(4, seed).at(np.arange(4)).tolist()) for seed in range(1200))
    assert set(counts) == set(itertools.permutations(range(4)))
    chi_squared = sum((count - 50) ** 2 / 50 for count in counts.values())
    assert chi_squared < 49.7, chi_squared  # 23 degrees of freedom, p = 0.001


def test_shuffle_leaves_no_trace_of_the_old_order() -> None:
    n = 100_000
    image = KeyedPermutation(n, seed=3).at(np.arange(n))
    limit = 4 / np.sqrt(n)  # four standard deviations of the correlation of independent numbers
    for lag in (1, 2, 64, 1024):
        assert abs(np.corrcoef(image[:-lag], image[lag:])[0, 1]) < limit
    assert abs(np.corrcoef(np.arange(n), image)[0, 1]) < limit
    assert np.count_nonzero(image == np.arange(n)) < 8  # one is expected
    assert np.count_nonzero(np.abs(np.diff(image)) == 1) < 14  # two are expected
    # Any stretch of the order is spread over the whole corpus: a thousand samples over a hundred equal parts.
    parts = np.bincount(image[:1000] * 100 // n, minlength=100)
    assert ((parts - 10) ** 2 / 10).sum() < 149  # 99 degrees of freedom, p = 0.001


def test_epochs_and_seeds_are_unrelated() -> None:
    n = 100_000
    images = [KeyedPermutation(n, seed, epoch).at(np.arange(n)) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    for one, other in itertools.combinations(images, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(n)
        assert np.count_nonzero(one == other) < 8


def test_shuffle_reads_each_epoch_once_and_each_differently() -> None:
    order = SampleOrder(50, seed=7)
    read = [sample_at(order, position) for position in range(150)]
    assert [epoch for epoch, _ in read] == [0] * 50 + [1] * 50 + [2] * 50
    epochs = [[index for _, index in read[start : start + 50]] for start in (0, 50, 100)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_sequential_reads_as_it_stands() -> None:
    order = SampleOrder(3, seed=7, kind="sequential")
    assert [sample_at(order, i) for i in range(7)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


@pytest.mark.parametrize("kind", ["shuffle", "sequential"])
def test_order_is_a_pure_function_of_the_position(kind: str) -> None:
    """Asked at once, one by one, or from the middle on (as a resumed run does), the answer is the same."""
    positions = np.arange(200)
    whole = SampleOrder(23, 5, kind).at_many(positions)  # type: ignore[arg-type]
    single = [sample_at(SampleOrder(23, 5, kind), int(i)) for i in positions]  # type: ignore[arg-type]
    assert list(zip(*(array.tolist() for array in whole), strict=True)) == single
    later = SampleOrder(23, 5, kind).at_many(positions[77:])  # type: ignore[arg-type]
    assert np.array_equal(later[1], whole[1][77:])


def test_the_order_never_changes() -> None:
    """Golden values: a run that is resumed with a newer version must continue in the order that it started with."""
    _, indices = SampleOrder(1000, 1234).at_many(np.array([0, 1, 2, 999, 1000, 1001]))
    assert indices.tolist() == [301, 508, 818, 796, 180, 909]


def test_one_sample() -> None:
    assert [sample_at(SampleOrder(1, 9), i) for i in range(3)] == [(0, 0), (1, 0), (2, 0)]
