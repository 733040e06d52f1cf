"""Samples cut from a stream of tokens, and the documents that they hold."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from made_examples import write_examples
from made_tokens import write_documents
from token_sources import some_lengths, write_sources

from zerokara.config.data import causal
from zerokara.samples.packed_tokens import PackedTokens, TokenSource, read_sources


@pytest.mark.parametrize(("seq_len", "expected"), [(1, 16), (4, 4), (8, 2), (15, 1), (16, 1)])
def test_number_of_samples(prefix: Path, seq_len: int, expected: int) -> None:
    tokens = PackedTokens(prefix, causal(seq_len))
    assert len(tokens) == expected == causal(seq_len).samples_in(17)
    assert len(tokens.sample(expected - 1)) == seq_len + 1
    with pytest.raises(IndexError, match=f"sample {expected} of {expected}"):
        tokens.sample(expected)
    with pytest.raises(AssertionError, match="parts of 16 tokens of 17"):
        PackedTokens(prefix, causal(seq_len), parts=[5, 11])


@pytest.mark.parametrize("totals", [(300, 500, 70), (300, 0, 500), (0, 200, 0), (41,)])
@pytest.mark.parametrize("by_source", [False, True])
def test_the_documents_of_every_sample(tmp_path: Path, totals: tuple[int, ...], by_source: bool) -> None:
    owner = write_sources(tmp_path, some_lengths(3, totals))
    parts = totals if by_source else None
    samples = PackedTokens(tmp_path / "tokens_text_document", causal(7), parts=parts, seed=5)
    sources = read_sources(str(tmp_path / "tokens"))
    for index, epoch in itertools.product(range(len(samples)), range(3)):
        expected = list(dict.fromkeys(owner[token] for token in samples.sample(index, epoch).tolist()))
        assert samples.documents(index, epoch, sources) == expected


@pytest.mark.parametrize("parts", [(57,), (40, 17)])
def test_each_epoch_is_cut_anew_and_reads_nothing_twice(tmp_path: Path, parts: tuple[int, ...]) -> None:
    write_documents(tmp_path / "ring", [np.arange(57)], np.dtype(np.int32))
    samples, alike = (PackedTokens(tmp_path / "ring", causal(7), parts=parts, seed=seed) for seed in (5, None))
    firsts, learned = set(), set()
    for epoch in range(12):
        rows = samples.many(np.arange(len(samples)), np.full(len(samples), epoch))
        assert np.array_equal(rows, alike.many(np.arange(len(samples)), np.full(len(samples), epoch))) == (epoch == 0)
        labels = rows[:, 1:].ravel().tolist()
        assert len(labels) == len(set(labels))
        for row in rows:  # what follows a token is what follows it in its part, and after the last comes the first
            for size, start in zip(parts, (0, parts[0]), strict=False):
                if start <= row[0] < start + size:
                    assert row.tolist() == [start + (row[0] - start + step) % size for step in range(8)]
        firsts.add(rows[0, 0])
        learned |= set(labels)
    assert len(firsts) > 6
    assert learned == set(range(57)), "those behind the last sample have their turn"
    again = PackedTokens(tmp_path / "ring", causal(7), parts=parts, seed=5)
    assert np.array_equal(again.sample(2, 11), samples.sample(2, 11))


def test_a_document_of_several_sequences(tmp_path: Path) -> None:
    """As other makers of token files may write them: lengths 2, 3 and 4; the first document is the first two."""
    samples = PackedTokens(write_examples(tmp_path / "t", [[[0, 1], [2, 3, 4]], [[5, 6, 7, 8]]]), causal(2))
    touched = [samples.documents(index, 0, [TokenSource("a", 0, 9)]) for index in range(4)]
    first, second = (0, 0), (0, 1)
    assert touched == [[first], [first], [first, second], [second]]
