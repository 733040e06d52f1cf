from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from token_sources import sample_at

from zerokara.samples.apportionment import Apportionment
from zerokara.samples.batches import BatchLayout
from zerokara.samples.mixed_order import BLOCK_SAMPLES, MixedOrder, MixedStage

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


@pytest.mark.parametrize("kind", ["shuffle", "sequential"])
def test_nothing_of_a_source_is_read_twice_before_all_of_it(kind: str) -> None:
    stages = [MixedStage(stage.weights, stage.num_samples, kind) for stage in STAGES]  # type: ignore[arg-type]
    order = read(MixedOrder(stages, SAMPLES, seed=5), 5000)
    for source, num in enumerate(SAMPLES):
        own = [(epoch, index) for each, epoch, index in order if each == source]
        assert [epoch for epoch, _ in own] == [draw // num for draw in range(len(own))]
        epochs = [[index for _, index in own[start : start + num]] for start in range(0, len(own), num)]
        assert all(sorted(epoch) == list(range(num)) for epoch in epochs[:-1])
        assert len(set(epochs[-1])) == len(epochs[-1])
        if kind == "sequential":
            assert all(epoch == list(range(len(epoch))) for epoch in epochs)
        else:
            assert len(epochs) < 3 or epochs[0] != epochs[1]


def test_every_stage_has_exactly_its_seats() -> None:
    order = MixedOrder(STAGES, SAMPLES, seed=5)
    sources = [source for source, _, _ in read(order, 2200 + 3 * BLOCK_SAMPLES)]
    assert order.firsts == [0, 1500, 2200]
    assert Counter(sources[:1500]) == {0: 1125, 1: 375}
    assert Counter(sources[1500:2200]) == {1: 583, 2: 117}
    # At every block's edge each source stands where its weight says, and before that it does not in general.
    for block in (1, 2, 3):
        taken = Counter(sources[2200 : 2200 + block * BLOCK_SAMPLES])
        assert [taken[source] for source in range(3)] == Apportionment((1, 1, 1)).seats(block * BLOCK_SAMPLES)
    assert Counter(sources[:100]) != {0: 75, 1: 25}
    assert max(len(run) for run in "".join(map(str, sources[:1024])).split("1")) > 8  # shuffled: not every fourth


def test_sequential_sources_are_spread_evenly() -> None:
    order = MixedOrder([MixedStage((3, 1), None, "sequential")], (100, 100), seed=5)
    assert read(order, 8) == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 2), (0, 0, 3), (0, 0, 4), (1, 0, 1), (0, 0, 5)]


def test_counts_are_those_of_what_is_read_at_every_position() -> None:
    order = MixedOrder(STAGES, SAMPLES, seed=5)
    sources = [source for source, _, _ in read(order, 3500)]
    for num in (0, 1, 999, 1024, 1025, 1499, 1500, 1501, 2199, 2200, 2300, 3300, 3500):
        by_stage = order.counts_by_stage(num)
        for (first, end), counts in zip(((0, 1500), (1500, 2200), (2200, 3500)), by_stage, strict=True):
            assert counts == [sources[min(first, num) : min(end, num)].count(source) for source in range(3)]
        assert order.counts(num) == [sources[:num].count(source) for source in range(3)]


@pytest.mark.parametrize("kind", ["shuffle", "sequential"])
def test_order_is_a_pure_function_of_the_position(kind: str) -> None:
    """At once, one by one, from the middle on, back and forth, in another process: the same."""
    stages = (*STAGES[:1], MixedStage((1, 1, 1), None, kind))  # type: ignore[arg-type]
    samples = (25, 375, 9)  # the first stage reads whole passes, so that the second may read otherwise
    order = MixedOrder(stages, samples, seed=5)
    positions = np.arange(5000)
    epochs, indices = order.at_many(positions)
    mixed_up = np.random.default_rng(0).permutation(positions)
    again = MixedOrder(stages, samples, seed=5)
    assert [sample_at(again, int(i)) for i in mixed_up[:100]] == [(epochs[i], indices[i]) for i in mixed_up[:100]]
    assert np.array_equal(pickle.loads(pickle.dumps(again)).at_many(mixed_up)[1], indices[mixed_up])
    assert np.array_equal(again.at_many(positions[1777:])[1], indices[1777:])
    assert not np.array_equal(MixedOrder(stages, samples, seed=6).at_many(positions)[1], indices)


def test_the_last_stage_may_grow_and_others_be_added_without_a_change_of_the_past() -> None:
    closed = MixedOrder([*STAGES[:2]], SAMPLES, seed=5)
    longer = MixedOrder(STAGES, SAMPLES, seed=5)
    assert closed.length == 2200 and longer.length is None
    assert read(closed, 2200) == read(longer, 2200)
    with pytest.raises(AssertionError, match="last stage"):
        sample_at(closed, 2200)


def test_a_pass_of_the_other_order_is_left_and_whole_ones_are_not() -> None:
    first = MixedStage((1,), 70, "shuffle")
    order = MixedOrder([first, MixedStage((1,), 60, "sequential"), MixedStage((1,), None, "sequential")], (50,), seed=5)
    epochs, indices = order.at_many(np.arange(200))
    assert epochs[:70].tolist() == [0] * 50 + [1] * 20
    assert epochs[70:180].tolist() == [2] * 50 + [3] * 50 + [4] * 10  # epochs are never used twice
    assert indices[70:180].tolist() == [*range(50), *range(50), *range(10)]
    assert order.counts_by_stage(150) == [[70], [60], [20]]
    whole = MixedOrder([MixedStage((1,), 100, "shuffle"), MixedStage((1,), None, "sequential")], (50,), seed=5)
    assert sample_at(whole, 100) == (2, 0)


def test_a_point_of_a_huge_run_costs_nothing() -> None:
    order = MixedOrder([MixedStage((3, 1), None, "shuffle")], (10**12, 10**15), seed=1)
    epochs, indices = order.at_many(10**13 + np.arange(16))
    assert epochs.max() == 7 and indices.max() < 10**12 + 10**15
    assert order.counts(4 * 10**13) == [3 * 10**13, 10**13]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_sample_once_however_many_processes_read(num_ranks: int) -> None:
    order = MixedOrder(STAGES, SAMPLES, seed=5)
    plan = BatchLayout(global_batch_size=48, micro_batch_size=2, num_ranks=num_ranks)
    for consumed in (0, 48 * 31, 48 * 45):  # the second and third cross the edge of a stage
        shares = [order.at_many(plan.positions(consumed, rank).ravel()) for rank in range(num_ranks)]
        together = sorted(pair for share in shares for pair in zip(*(array.tolist() for array in share), strict=True))
        whole = order.at_many(np.arange(consumed, consumed + 48))
        assert together == sorted(zip(*(array.tolist() for array in whole), strict=True))


def test_the_order_never_changes() -> None:
    """Golden values: a run that is resumed with a newer version must continue in the order that it started with."""
    order = MixedOrder([MixedStage((3, 1), 1500, "shuffle"), MixedStage((1, 2), None, "shuffle")], (1000, 400), 1234)
    got = [sample_at(order, position) for position in (0, 1, 2, 1023, 1024, 1499, 1500, 5000)]
    assert got == [(0, 59), (0, 185), (0, 1331), (0, 555), (0, 18), (1, 99), (0, 1104), (6, 1300)]
