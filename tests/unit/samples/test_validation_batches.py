"""Validation batches: windows of documents, whole samples, parts and ranks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_tokens import write_documents
from unit.samples.span_texts import merged

from zerokara.config import data
from zerokara.samples.batches import Window, stride_of, validation_batches, windows
from zerokara.samples.objective import Batch, Causal, SpanCorruption

END = 2
DOCUMENTS = [[10, 11, 12, END], [20, 21, END], [*range(30, 39), END]]
"""Those at `prefix`."""


def causal(seq_len: int, masking_eod_id: int | None = None) -> Causal:
    return Causal(data.causal(seq_len), masking_eod_id)


def test_the_example_of_the_docstring(tmp_path: Path) -> None:
    write_documents(tmp_path / "t", [np.array([7, 8, 9, 4, 5, 2]), np.array([6, 2])], np.dtype(np.uint16))
    ((_, batch),) = validation_batches(tmp_path / "t", causal(4), start_id=2).batches(micro_batch_size=3)
    assert batch.inputs.tolist()[:2] == [[2, 7, 8, 9], [8, 9, 4, 5]] and batch.inputs[2, :2].tolist() == [2, 6]
    assert batch.labels.tolist()[:2] == [[7, 8, 9, 4], [9, 4, 5, 2]] and batch.labels[2, :2].tolist() == [6, 2]
    assert batch.loss_mask.tolist() == [[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]
    assert batch.document_offsets.tolist() == [0, 4, 8, 10, 12] and batch.num_pairs == 16 + 16 + 4 + 4
    assert replace(batch, segments=None, document_offsets=None).num_pairs == batch.labels.size * batch.labels.shape[1]


@pytest.mark.parametrize("seq_len", [1, 2, 5, 16, 17, 18, 40])
@pytest.mark.parametrize(("num_ranks", "micro"), [(1, 1), (1, 4), (3, 2), (8, 1)])
def test_every_token_is_predicted_once_in_its_document(prefix: Path, seq_len: int, num_ranks: int, micro: int) -> None:
    evaluation = validation_batches(prefix, causal(seq_len), start_id=END)
    per_rank = [[batch for _, batch in evaluation.batches(micro, rank, num_ranks)] for rank in range(num_ranks)]
    assert len({len(batches) for batches in per_rank}) == 1  # or ranks would wait for each other
    assert all(batch.inputs.shape == (micro, seq_len) for batches in per_rank for batch in batches)
    found = [pair for batches in per_rank for batch in batches for pair in predictions(batch)]
    contexts = [([END, *document[:place]], token) for document in DOCUMENTS for place, token in enumerate(document)]
    by_place = {(context[-1], label): context for context, label in contexts}
    assert sorted((read[-1], label) for read, label in found) == sorted(by_place)
    for read, label in found:
        context = by_place[read[-1], label]
        assert read == context[-len(read) :]
        assert len(read) >= min(len(context), seq_len - stride_of(seq_len, 0.5) + 1)


def test_short_documents_share_a_row(tmp_path: Path) -> None:
    write_documents(tmp_path / "t", [np.array([5, 6, END])] * 100, np.dtype(np.uint16))
    batches = [batch for _, batch in validation_batches(tmp_path / "t", causal(32), start_id=END).batches(1)]
    assert len(batches) == 10 and sum(batch.loss_mask.sum() for batch in batches) == 300


@pytest.mark.parametrize("max_tokens", [None, 1, 3, 5])
def test_a_start_that_stands_in_the_file_is_read_and_not_predicted(tmp_path: Path, max_tokens: int | None) -> None:
    """As it is read where it does not stand there; and no limit takes the start alone."""
    documents = [np.array([1, 5, 6, END]), np.array([1, *range(30, 39), END])]
    write_documents(tmp_path / "with", documents, np.dtype(np.uint16))
    write_documents(tmp_path / "without", [each[1:] for each in documents], np.dtype(np.uint16))
    read = validation_batches(tmp_path / "with", causal(4), start_id=1, max_tokens=max_tokens)
    (first, *_), (plain, *_) = (
        [batch for _, batch in each.batches(8)]
        for each in (read, validation_batches(tmp_path / "without", causal(4), 1))
    )
    assert 1 not in first.labels[first.loss_mask > 0] and first.loss_mask.sum() > 0
    if max_tokens is None:
        assert all((getattr(first, name) == getattr(plain, name)).all() for name in ("inputs", "labels", "loss_mask"))


def test_a_limit_takes_the_first_documents(prefix: Path) -> None:
    for max_tokens, expected in ((6, [4]), (7, [4, 3]), (16, [4, 3]), (17, [4, 3, 10]), (3, [3]), (1, [1])):
        batches = validation_batches(prefix, causal(40), start_id=END, max_tokens=max_tokens).batches(1)
        lengths = [length for _, batch in batches for length in lengths_of(batch)]
        assert lengths == expected, max_tokens


def of_part(per_rank: list[list[tuple[int, Batch]]], number: int) -> list[Batch]:
    """The batches of a part, of all ranks; each rank has as many."""
    assert len({tuple(part for part, _ in batches) for batches in per_rank}) == 1  # or ranks would wait for each other
    return [batch for batches in per_rank for part, batch in batches if part == number]


def test_parts_count_their_own_documents(prefix: Path) -> None:
    parts = [DOCUMENTS[:2], [], DOCUMENTS[2:]]
    part_tokens = [sum(map(len, part)) for part in parts]
    for seq_len, num_ranks, micro in ((4, 1, 1), (5, 2, 1), (3, 3, 2), (40, 1, 4)):
        evaluation = validation_batches(prefix, causal(seq_len), start_id=END, part_tokens=part_tokens)
        per_rank = [list(evaluation.batches(micro, rank, num_ranks)) for rank in range(num_ranks)]
        for number, part in enumerate(parts):
            labels = [label for batch in of_part(per_rank, number) for _, label in predictions(batch)]
            assert sorted(labels) == sorted(token for document in part for token in document)


def test_a_limit_takes_from_every_part_in_proportion(prefix: Path) -> None:
    """Of 7 and 10 tokens half is 3 and 5: neither's first document fits, so its beginning is taken.

    The limit of 1 takes a token of each."""
    for max_tokens, first, second in ((9, 3, 5), (12, 4, 7), (1, 1, 1)):
        evaluation = validation_batches(prefix, causal(40), 2, part_tokens=[7, 10], max_tokens=max_tokens)
        labels = [(part, label) for part, batch in evaluation.batches(1) for _, label in predictions(batch)]
        expected = [(0, label) for label in DOCUMENTS[0][:first]] + [(1, label) for label in DOCUMENTS[2][:second]]
        assert labels == expected


def predictions(batch: Batch) -> list[tuple[list[int], int]]:
    """For each label that counts: the inputs that its position may attend to, and the label."""
    found = []
    for inputs, labels, mask, segments in zip(batch.inputs, batch.labels, batch.loss_mask, batch.segments, strict=True):
        for place in np.flatnonzero(mask):
            read = inputs[: place + 1][segments[: place + 1] == segments[place]]
            found.append((read.tolist(), int(labels[place])))
    return found


def lengths_of(batch: Batch) -> list[int]:
    """Labels that count in each segment."""
    return np.bincount(batch.segments[batch.loss_mask > 0]).tolist()


def masked(seq_len: int = 8) -> SpanCorruption:
    lengths = data.with_spans(seq_len, 0.3, 1.5)  # of 8 tokens 2 or 3 are noise
    return SpanCorruption(lengths, seed=1, sentinel_ids=np.arange(99, 89, -1), end_id=2, start_id=3)


@pytest.mark.parametrize(("num_ranks", "micro"), [(1, 1), (1, 4), (2, 1), (3, 2)])
def test_masked_samples_cover_every_part_whole(prefix: Path, num_ranks: int, micro: int) -> None:
    """17 tokens in parts of 7, 0 and 10: each is cut by itself, its last sample filled up with uncounted ends."""
    made, tokens = masked(), [token for document in DOCUMENTS for token in document]
    raw = made.lengths.raw
    evaluation = validation_batches(prefix, made, start_id=2, part_tokens=[7, 0, 10])
    per_rank = [list(evaluation.batches(micro, rank, num_ranks)) for rank in range(num_ranks)]
    for number, part in enumerate([tokens[:7], [], tokens[7:]]):
        texts = [
            merged(read, written, made.sentinel_ids, 2).tolist()
            for batch in of_part(per_rank, number)
            for read, written, counts in zip(batch.inputs, batch.labels, batch.loss_mask.any(axis=1), strict=True)
            if counts
        ]
        filled = [*part, *[2] * (-len(part) % raw)]
        assert sorted(texts) == sorted(filled[start : start + raw] for start in range(0, len(part), raw))


def test_a_text_shorter_than_a_sample_shows_no_answer(tmp_path: Path) -> None:
    made = masked(24)
    write_documents(tmp_path / "t", [np.arange(10, 20)], np.dtype(np.uint16))
    ((_, batch),) = validation_batches(tmp_path / "t", made, 2).batches(1)
    counted = batch.labels[batch.loss_mask > 0]
    answers = counted[np.isin(counted, np.arange(10, 20))]
    assert len(answers) and not np.isin(answers, batch.inputs).any()
    assert (counted == made.end_id).sum() == 1, "that of the target, and none of those that fill the sample"
    spans = np.flatnonzero(np.isin(batch.labels[0], made.sentinel_ids) & (batch.loss_mask[0] > 0))
    assert len(spans) and np.isin(batch.labels[0, spans + 1], answers).all(), "spans without text do not count"


def test_every_validation_masks_the_same_tokens_and_each_sample_others(tmp_path: Path) -> None:
    objective = masked(24)
    raw = objective.lengths.raw
    write_documents(tmp_path / "t", [np.arange(10, 10 + raw)] * 8, np.dtype(np.uint16))

    def labels(micro: int) -> list[list[int]]:
        batches = validation_batches(tmp_path / "t", objective, 2, part_tokens=[4 * raw, 4 * raw]).batches(micro)
        return [row for _, batch in batches for row in batch.labels[batch.loss_mask[:, 0] > 0].tolist()]

    assert labels(1) == labels(3) and labels(1)[:4] != labels(1)[4:], "by their number over all parts"


def test_the_windows_of_the_docstring() -> None:
    assert list(windows(8, 4, 2)) == [Window(0, 0, 5, 1), Window(0, 2, 7, 5), Window(0, 3, 8, 7)]


def test_the_stride_leaves_the_context_that_is_asked_for() -> None:
    assert [stride_of(8, 0.5), stride_of(8, 0), stride_of(1, 0.5), stride_of(8, 0.99)] == [4, 8, 1, 1]
