from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zerokara.config.data import causal
from zerokara.samples.batches import Batches, BatchLayout
from zerokara.samples.objective import Batch, Causal
from zerokara.samples.order import SampleOrder
from zerokara.samples.packed_tokens import PackedTokens

GLOBAL_BATCH = 24
SHARES = [(1, 24), (1, 4), (1, 1), (2, 12), (2, 3), (3, 8), (3, 2), (8, 3), (8, 1)]


def rows_of(batch: Batch) -> list[list[int]]:
    """The tokens of which a causal batch was made."""
    return np.concatenate([batch.inputs, batch.labels[:, -1:]], axis=1).tolist()


def test_the_example_of_the_docstring() -> None:
    plan = BatchLayout(global_batch_size=8, micro_batch_size=2, num_ranks=2)
    assert plan.num_micro_steps == 2
    assert plan.positions(80, rank=0).tolist() == [[80, 81], [84, 85]]
    assert plan.positions(80, rank=1).tolist() == [[82, 83], [86, 87]]


@pytest.mark.parametrize(("num_ranks", "micro"), SHARES)
def test_the_global_batch_is_the_same_set_of_sequences(prefix: Path, num_ranks: int, micro: int) -> None:
    tokens = PackedTokens(prefix, causal(1))  # 16 samples, so a batch of 24 crosses the edge of an epoch
    order = SampleOrder(len(tokens), seed=3)

    def global_batch(plan: BatchLayout) -> list[list[int]]:
        rows = [Batches(tokens, order, plan, Causal(causal(1)), rank).at(consumed=24) for rank in range(plan.num_ranks)]
        return sorted(row for micro_batches in rows for batch in micro_batches for row in rows_of(batch))

    plan = BatchLayout(GLOBAL_BATCH, micro, num_ranks)
    assert {plan.positions(24, rank).shape for rank in range(num_ranks)} == {(plan.num_micro_steps, micro)}
    assert global_batch(plan) == global_batch(BatchLayout(GLOBAL_BATCH, GLOBAL_BATCH))


def test_micro_batches_follow_the_order(prefix: Path) -> None:
    tokens = PackedTokens(prefix, causal(5))
    batches = Batches(tokens, SampleOrder(3, seed=0, kind="sequential"), BatchLayout(4, 2), Causal(causal(5)))
    first, second = batches.at(0)
    assert rows_of(first) == [tokens[0].tolist(), tokens[1].tolist()]
    assert rows_of(second) == [tokens[2].tolist(), tokens[0].tolist()]


def test_a_share_that_does_not_divide_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="global_batch_size=8, micro_batch_size=3"):
        BatchLayout(8, 3)
