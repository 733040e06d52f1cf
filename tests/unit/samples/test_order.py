"""The order of one stream, the seats of a mixture, the order of a mixture in stages, and the shares of ranks."""

import itertools
import pickle
from collections import Counter

import numpy as np
import pytest
from token_sources import plainly, sample_at

from zerokara.config.data import OrderKind
from zerokara.samples.batches import BatchLayout
from zerokara.samples.order import (
    GOLDEN,
    Apportionment,
    KeyedPermutation,
    MixedOrder,
    MixedStage,
    SampleOrder,
    mix,
    whole_weights,
)

KINDS: tuple[OrderKind, ...] = ("shuffle", "sequential")


def test_mix_is_splitmix64() -> None:
    """The first outputs of the published generator for seed 1234567 (state advanced by the golden ratio each time)."""
    outputs = [mix(1234567 + (k + 1) * GOLDEN) for k in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 63, 64, 65, 257, 1000, 65_537])
def test_permutation_reaches_everything_once(n: int) -> None:
    for seed, epoch in ((0, 0), (1234, 7), (-5, 2)):
        image = KeyedPermutation(n, seed, epoch).at(np.arange(n))
        assert image.dtype == np.int64 and np.array_equal(np.sort(image), np.arange(n))


def test_every_permutation_of_a_small_set_comes_about_equally_often() -> None:
    counts = Counter(tuple(KeyedPermutation(4, seed).at(np.arange(4)).tolist()) for seed in range(600))
    assert set(counts) == set(itertools.permutations(range(4)))
    chi_squared = sum((count - 25) ** 2 / 25 for count in counts.values())
    assert chi_squared < 49.7, chi_squared  # 23 degrees of freedom, p = 0.001


def test_shuffle_leaves_no_trace_of_the_old_order_nor_of_another_epoch_or_seed() -> None:
    n = 100_000
    image, *others = (KeyedPermutation(n, seed, epoch).at(np.arange(n)) for seed, epoch in ((1, 0), (1, 1), (2, 0)))
    limit = 4 / np.sqrt(n)  # four standard deviations of the correlation of independent numbers
    for lag in (1, 2, 64, 1024):
        assert abs(np.corrcoef(image[:-lag], image[lag:])[0, 1]) < limit
    for other in (np.arange(n), *others):
        assert abs(np.corrcoef(image, other)[0, 1]) < limit
        assert np.count_nonzero(image == other) < 8  # one is expected
    assert np.count_nonzero(np.abs(np.diff(image)) == 1) < 14  # two are expected
    # Any stretch of the order is spread over the whole corpus: a thousand samples over a hundred equal parts.
    parts = np.bincount(image[:1000] * 100 // n, minlength=100)
    assert ((parts - 10) ** 2 / 10).sum() < 149  # 99 degrees of freedom, p = 0.001


def test_each_epoch_is_read_once_and_shuffled_ones_differ() -> None:
    epochs, indices = SampleOrder(50, seed=7).at_many(np.arange(150))
    assert epochs.tolist() == [0] * 50 + [1] * 50 + [2] * 50
    first, second, third = indices.reshape(3, 50).tolist()
    assert sorted(first) == sorted(second) == sorted(third) == list(range(50))
    assert first != second != third != first
    order = SampleOrder(3, seed=7, kind="sequential")
    assert [sample_at(order, i) for i in range(7)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert [sample_at(SampleOrder(1, 9), i) for i in range(3)] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixed", [False, True])
def test_order_is_a_pure_function_of_the_position(kind: OrderKind, mixed: bool) -> None:
    """At once, one by one, from the middle on (as a resumed run does), back and forth, in another process: the same."""

    def order(seed: int) -> SampleOrder | MixedOrder:
        # The first stage reads whole epochs, so that the second may read otherwise.
        stages = (STAGES[0], MixedStage((1, 1, 1), None, kind))
        return MixedOrder(stages, (25, 375, 9), seed) if mixed else SampleOrder(23, seed, kind)

    positions = np.arange(5000)
    epochs, indices = order(5).at_many(positions)
    mixed_up = np.random.default_rng(0).permutation(positions)
    again = order(5)
    assert [sample_at(again, int(i)) for i in mixed_up[:50]] == [(epochs[i], indices[i]) for i in mixed_up[:50]]
    assert np.array_equal(pickle.loads(pickle.dumps(again)).at_many(mixed_up)[1], indices[mixed_up])
    assert np.array_equal(again.at_many(positions[1777:])[1], indices[1777:])
    assert np.array_equal(order(6).at_many(positions)[1], indices) == (kind == "sequential" and not mixed)


def test_the_order_never_changes() -> None:
    """Golden values: a run that is resumed with a newer version must continue in the order that it started with."""
    _, indices = SampleOrder(1000, 1234).at_many(np.array([0, 1, 2, 999, 1000, 1001]))
    assert indices.tolist() == [301, 508, 818, 796, 180, 909]
    order = MixedOrder([MixedStage((3, 1), 1500, "shuffle"), MixedStage((1, 2), None, "shuffle")], (1000, 400), 1234)
    got = [sample_at(order, position) for position in (0, 1, 2, 1023, 1024, 1499, 1500, 5000)]
    assert got == [(0, 59), (0, 185), (0, 1331), (0, 555), (0, 18), (1, 99), (0, 1104), (6, 1300)]


@pytest.mark.parametrize(
    "weights", [(1,), (3, 1), (1, 1, 1), (5, 0, 2), (1, 1000), (7, 5, 3, 1), (10**9 + 7, 123_456_789, 2), (0, 0, 4)]
)
def test_seats_are_those_of_the_method_wherever_one_begins(weights: tuple[int, ...]) -> None:
    expected, seats = plainly(weights, 400), Apportionment(weights)
    for num in range(401):
        counts = seats.seats(num)
        assert counts == [expected[:num].count(source) for source in range(len(weights))]
        assert all(abs(n - w * num / sum(weights)) <= len(weights) / 2 for n, w in zip(counts, weights, strict=True))
    for first in (0, 1, 17, 399):
        assert seats.sequence(first, 400 - first) == expected[first:]


def test_whole_shares_are_given_exactly_and_a_far_seat_costs_nothing() -> None:
    assert Apportionment((3, 1)).sequence(0, 12) == [0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0], "the docstring's example"
    assert Apportionment((123, 0, 77, 1)).seats(201) == [123, 0, 77, 1]
    assert Apportionment((3, 1)).seats(4 * 10**15) == [3 * 10**15, 10**15]
    counts = Apportionment((10**9 + 7, 123_456_789, 2)).seats(10**12)
    assert sum(counts) == 10**12 and all(isinstance(count, int) for count in counts)


def test_weights_are_what_was_written() -> None:
    assert whole_weights([0.1, 0.2, 0]) == (1, 2, 0)  # and not 0.1's nearest binary fraction
    assert whole_weights([3.0, 1.5, 1e-3]) == (3000, 1500, 1)
    assert whole_weights([8e9, 4e9]) == (2, 1)


SAMPLES = (50, 700, 9)
STAGES = (
    MixedStage((3, 1, 0), 1500, "shuffle"),
    MixedStage((0, 5, 1), 700, "shuffle"),
    MixedStage((1, 1, 1), None, "shuffle"),
)


def read(order: MixedOrder, num: int) -> list[tuple[int, int, int]]:
    """(source, epoch, index in the source) of the first `num` positions."""
    epochs, indices = order.at_many(np.arange(num))
    firsts = np.cumsum([0, *order.samples_per_source])[:-1]
    sources = np.searchsorted(firsts, indices, side="right") - 1
    return list(zip(sources.tolist(), epochs.tolist(), (indices - firsts[sources]).tolist(), strict=True))


def test_stages_may_be_added_without_a_change_of_the_past() -> None:
    closed, longer = (MixedOrder(STAGES[:number], SAMPLES, seed=5) for number in (2, 3))
    assert read(closed, 2200) == read(longer, 2200)


def test_an_epoch_of_the_other_order_is_left_and_whole_ones_are_not() -> None:
    """The epoch's number is never used twice; test_data_plan has the samples."""
    for num, following in ((70, 2), (100, 2)):
        order = MixedOrder([MixedStage((1,), num, "shuffle"), MixedStage((1,), None, "sequential")], (50,), seed=5)
        assert sample_at(order, num) == (following, 0)


def test_a_point_of_a_huge_run_costs_nothing() -> None:
    image = KeyedPermutation(10**15, seed=1).at(np.array([0, 1, 10**15 - 1]))
    assert len(set(image.tolist())) == 3 and image.min() >= 0 and image.max() < 10**15
    order = MixedOrder([MixedStage((3, 1), None, "shuffle")], (10**12, 10**15), seed=1)
    epochs, indices = order.at_many(10**13 + np.arange(16))
    assert epochs.max() == 7 and indices.max() < 10**12 + 10**15
    assert order.counts(4 * 10**13) == [3 * 10**13, 10**13]


def test_each_rank_takes_its_share_of_every_micro_step() -> None:
    """The example of the docstring; test_data_plan reads whole runs by several ranks."""
    plan = BatchLayout(global_batch_size=8, micro_batch_size=2, num_ranks=2)
    assert plan.positions(80, rank=0).tolist() == [[80, 81], [84, 85]]
    assert plan.positions(80, rank=1).tolist() == [[82, 83], [86, 87]]
    with pytest.raises(AssertionError, match="global_batch_size=8, micro_batch_size=3"):
        BatchLayout(8, 3)
