from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zerokara.samples.evaluation import EvaluationTokens
from zerokara.samples.objective import objective
from zerokara.samples.packed import PackedTokens
from zerokara.tokens.indexed import write_documents


def test_the_example_of_the_docstring(tmp_path: Path) -> None:
    write_documents(tmp_path / "t", [np.array([7, 8, 9, 4, 5])], np.dtype(np.uint16))
    (batch,) = EvaluationTokens(tmp_path / "t", seq_len=2, start_id=0).batches(micro_batch_size=3)
    assert batch.inputs.tolist() == [[0, 7], [8, 9], [4, 5]]
    assert batch.labels.tolist()[:2] == [[7, 8], [9, 4]] and batch.labels[2, 0] == 5
    assert batch.loss_mask.tolist() == [[1, 1], [1, 1], [1, 0]]


@pytest.mark.parametrize("seq_len", [1, 2, 5, 16, 17, 18, 40])
@pytest.mark.parametrize(("num_ranks", "micro"), [(1, 1), (1, 4), (2, 1), (3, 2), (8, 1)])
def test_every_token_is_predicted_once_from_its_predecessor(
    prefix: Path, seq_len: int, num_ranks: int, micro: int
) -> None:
    evaluation = EvaluationTokens(prefix, seq_len, start_id=2)
    per_rank = [list(evaluation.batches(micro, rank, num_ranks)) for rank in range(num_ranks)]
    assert len({len(batches) for batches in per_rank}) == 1  # or ranks would wait for each other
    assert all(batch.inputs.shape == (micro, seq_len) for batches in per_rank for batch in batches)
    pairs = []
    for batches in per_rank:
        for batch in batches:
            counted = batch.loss_mask == 1
            pairs += list(zip(batch.inputs[counted].tolist(), batch.labels[counted].tolist(), strict=True))
    tokens = PackedTokens(prefix, 16)[0].tolist()
    assert sorted(pairs) == sorted(zip([2, *tokens[:-1]], tokens, strict=True))


def test_the_first_tokens_only(prefix: Path) -> None:
    evaluation = EvaluationTokens(prefix, seq_len=4, start_id=2, max_tokens=6)
    assert evaluation.num_tokens == 6 and evaluation.tokens.tolist() == [10, 11, 12, 2, 20, 21]
    assert sum(batch.loss_mask.sum() for batch in evaluation.batches(2)) == 6


def test_documents_are_isolated_here_too(prefix: Path) -> None:
    """The documents [10 11 12 2] [20 21 2] [30 …]: each begins with the end of the one before."""
    (batch,) = EvaluationTokens(prefix, seq_len=9, start_id=2, max_tokens=9).batches(
        1, objective=objective("causal", isolate_at=2)
    )
    assert batch.inputs.tolist() == [[2, 10, 11, 12, 2, 20, 21, 2, 30]]
    assert batch.segments is not None and batch.segments.tolist() == [[1, 1, 1, 1, 2, 2, 2, 3, 3]]
