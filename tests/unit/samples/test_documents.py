from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from token_sources import some_lengths, write_sources

from zerokara.config.data import causal
from zerokara.durable import atomic_file
from zerokara.samples.documents import DocumentId, SampleDocuments
from zerokara.samples.packed import PackedTokens
from zerokara.samples.sources import TokenSource, read_sources
from zerokara.tokens.indexed import HEADER, MAGIC
from zerokara.tokens.layout import TokenPaths, bin_path, idx_path


@pytest.mark.parametrize("totals", [(300, 500, 70), (300, 0, 500), (0, 200, 0), (41,)])
@pytest.mark.parametrize("by_source", [False, True])
def test_the_documents_of_every_sample(tmp_path: Path, totals: tuple[int, ...], by_source: bool) -> None:
    owner = write_sources(tmp_path, some_lengths(3, totals))
    samples = PackedTokens(tmp_path / "tokens_text_document", causal(7), parts=totals if by_source else None)
    documents = SampleDocuments(samples, read_sources(str(tmp_path / "tokens")))
    for index in range(len(samples)):
        expected = list(dict.fromkeys(owner[token] for token in samples[index].tolist()))
        assert [(place.source, place.document) for place in documents.in_sample(index)] == expected


def test_a_document_of_several_sequences(tmp_path: Path) -> None:
    """As other makers of token files may write them: lengths 2, 3 and 4; the first document is the first two."""
    paths = TokenPaths(str(tmp_path / "t"))
    with atomic_file(bin_path(paths.train)) as file:
        file.write(np.arange(9, dtype="<u2").data)
    with atomic_file(idx_path(paths.train)) as file:
        file.write(HEADER.pack(MAGIC, 1, 8, 3, 3))
        file.write(np.array([2, 3, 4], "<i4").data)
        file.write(np.array([0, 4, 10], "<i8").data)
        file.write(np.array([0, 2, 3], "<i8").data)
    documents = SampleDocuments(PackedTokens(paths.train, causal(2)), [TokenSource("a", 0, 9)])
    touched = [documents.in_sample(index) for index in range(4)]
    first, second = DocumentId(0, 0), DocumentId(0, 1)
    assert touched == [[first], [first], [first, second], [second]]
