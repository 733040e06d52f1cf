from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from span_texts import merged

from zerokara.config import sample_lengths
from zerokara.samples.evaluation import SampleBatches, evaluation_batches
from zerokara.samples.objective import Causal, SpanCorruption
from zerokara.samples.packed import PackedTokens
from zerokara.tokens.indexed import write_documents


def causal(seq_len: int, masking_eod_id: int | None = None) -> Causal:
    return Causal(sample_lengths.causal(seq_len), masking_eod_id)


def test_the_example_of_the_docstring(tmp_path: Path) -> None:
    write_documents(tmp_path / "t", [np.array([7, 8, 9, 4, 5])], np.dtype(np.uint16))
    ((_, batch),) = evaluation_batches(tmp_path / "t", causal(2), start_id=0).batches(micro_batch_size=3)
    assert batch.inputs.tolist() == [[0, 7], [8, 9], [4, 5]]
    assert batch.labels.tolist()[:2] == [[7, 8], [9, 4]] and batch.labels[2, 0] == 5
    assert batch.loss_mask.tolist() == [[1, 1], [1, 1], [1, 0]]


@pytest.mark.parametrize("seq_len", [1, 2, 5, 16, 17, 18, 40])
@pytest.mark.parametrize(("num_ranks", "micro"), [(1, 1), (1, 4), (2, 1), (3, 2), (8, 1)])
def test_every_token_is_predicted_once_from_its_predecessor(
    prefix: Path, seq_len: int, num_ranks: int, micro: int
) -> None:
    evaluation = evaluation_batches(prefix, causal(seq_len), start_id=2)
    per_rank = [[batch for _, batch in evaluation.batches(micro, rank, num_ranks)] for rank in range(num_ranks)]
    assert len({len(batches) for batches in per_rank}) == 1  # or ranks would wait for each other
    assert all(batch.inputs.shape == (micro, seq_len) for batches in per_rank for batch in batches)
    pairs = []
    for batches in per_rank:
        for batch in batches:
            counted = batch.loss_mask == 1
            pairs += list(zip(batch.inputs[counted].tolist(), batch.labels[counted].tolist(), strict=True))
    tokens = PackedTokens(prefix, sample_lengths.causal(16))[0].tolist()
    assert sorted(pairs) == sorted(zip([2, *tokens[:-1]], tokens, strict=True))


def test_the_first_tokens_only(prefix: Path) -> None:
    evaluation = evaluation_batches(prefix, causal(4), start_id=2, max_tokens=6)
    assert evaluation.num_tokens == 6 and evaluation.tokens.tolist() == [10, 11, 12, 2, 20, 21]
    assert sum(batch.loss_mask.sum() for _, batch in evaluation.batches(2)) == 6


def test_documents_are_isolated_here_too(prefix: Path) -> None:
    """The documents [10 11 12 2] [20 21 2] [30 …]: each begins with the end of the one before."""
    ((_, batch),) = evaluation_batches(prefix, causal(9, masking_eod_id=2), start_id=2, max_tokens=9).batches(1)
    assert batch.inputs.tolist() == [[2, 10, 11, 12, 2, 20, 21, 2, 30]]
    assert batch.segments is not None and batch.segments.tolist() == [[1, 1, 1, 1, 2, 2, 2, 3, 3]]


def test_parts_count_each_of_their_tokens_once(prefix: Path) -> None:
    tokens = evaluation_batches(prefix, causal(4), start_id=2).tokens.tolist()
    parts = [7, 0, 1, len(tokens) - 8]
    for seq_len, num_ranks, micro in ((4, 1, 1), (5, 2, 1), (3, 3, 2), (40, 1, 4)):
        evaluation = evaluation_batches(prefix, causal(seq_len), start_id=2, part_tokens=parts)
        assert [end - first for first, end in evaluation.parts] == parts
        per_rank = [list(evaluation.batches(micro, rank, num_ranks)) for rank in range(num_ranks)]
        assert len({tuple(part for part, _ in batches) for batches in per_rank}) == 1
        for number, (first, end) in enumerate(evaluation.parts):
            batches = [batch for batches in per_rank for part, batch in batches if part == number]
            pairs = [
                pair
                for batch in batches
                for pair in zip(
                    batch.inputs[batch.loss_mask == 1].tolist(),
                    batch.labels[batch.loss_mask == 1].tolist(),
                    strict=True,
                )
            ]
            assert sorted(pairs) == sorted(zip([2, *tokens][first:end], tokens[first:end], strict=True))


def test_a_limit_takes_from_every_part_whole_documents(prefix: Path) -> None:
    """The documents are [10 11 12 2] [20 21 2] [30 …]; of 7 and the rest half is taken."""
    whole = evaluation_batches(prefix, causal(4), start_id=2)
    evaluation = evaluation_batches(
        prefix, causal(4), start_id=2, part_tokens=[7, whole.num_tokens - 7], max_tokens=int(whole.num_tokens * 0.9)
    )
    (first, second), (third, fourth) = evaluation.parts
    assert (first, second) == (0, 4) and evaluation.tokens[second - 1] == 2  # 6 of 7, up to the end of a document
    assert 0 < fourth - third <= 0.9 * (whole.num_tokens - 7) and evaluation.tokens[4] == whole.tokens[7]


def with_gaps() -> SpanCorruption:
    lengths = sample_lengths.with_spans(8, 0.3, 1.5)  # of 8 tokens 2 or 3 are noise
    return SpanCorruption(lengths, seed=1, sentinels=np.arange(99, 89, -1), end_id=2, start_id=3)


@pytest.mark.parametrize(("num_ranks", "micro"), [(1, 1), (1, 4), (2, 1), (3, 2)])
def test_texts_with_gaps_cover_every_part_whole(prefix: Path, num_ranks: int, micro: int) -> None:
    """17 tokens in parts of 12, 0 and 5: each is cut by itself, its last sample filled up from its beginning."""
    made = with_gaps()
    taken, tokens = made.lengths.raw, evaluation_batches(prefix, causal(4), start_id=2).tokens.tolist()
    parts = [tokens[:12], [], tokens[12:]]
    evaluation = evaluation_batches(prefix, made, start_id=2, part_tokens=[12, 0, 5])
    assert isinstance(evaluation, SampleBatches) and evaluation.num_parts == 3
    per_rank = [list(evaluation.batches(micro, rank, num_ranks)) for rank in range(num_ranks)]
    assert len({tuple(part for part, _ in batches) for batches in per_rank}) == 1  # or ranks would wait for each other
    for number, part in enumerate(parts):
        texts = [
            merged(read, written, made.sentinels, 2).tolist()
            for batches in per_rank
            for place, batch in batches
            if place == number
            for read, written, counts in zip(batch.inputs, batch.labels, batch.loss_mask[:, 0], strict=True)
            if counts
        ]
        expected = [(part * taken)[start : start + taken] for start in range(0, len(part), taken)]
        assert sorted(texts) == sorted(expected)


def test_every_validation_asks_for_the_same_words(prefix: Path) -> None:
    def labels(micro: int) -> list[list[int]]:
        batches = evaluation_batches(prefix, with_gaps(), start_id=2).batches(micro)
        return [row for _, batch in batches for row in batch.labels[batch.loss_mask[:, 0] > 0].tolist()]

    assert labels(1) == labels(3) and len(labels(1)) == -(-17 // with_gaps().lengths.raw)
