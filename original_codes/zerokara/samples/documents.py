"""Which documents a training sample touches: a sample's number → (source, number of the document in the source).

Documents are numbered from 0 among the training documents of their source, in the order of the corpus. A sample
touches every document of which it holds a token, the end of the document included. Found by halving in the
.idx, so that a sample of a terabyte costs a few dozen reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from zerokara.samples.packed import PackedTokens
from zerokara.samples.sources import Source
from zerokara.tokens.indexed import IndexedTokens


@dataclass(frozen=True)
class DocumentPlace:
    """One document."""

    source: int
    """Which source."""
    document: int
    """Which of its training documents."""


class SampleDocuments:
    """The documents of the samples of one pair of token files."""

    def __init__(self, samples: PackedTokens, sources: Sequence[Source]):
        self._samples, self._sources = samples, sources
        self._index = IndexedTokens(samples.prefix)
        self._first_documents = [self._document_at(source.first_token) for source in sources]

    def touched_by(self, sample: int) -> list[DocumentPlace]:
        """The documents of which sample `sample` holds a token, in order."""
        first = self._samples.first_token(sample)
        last = first + self._samples.lengths.raw + self._samples.lengths.overlap - 1
        return [self._place(document) for document in range(self._document_at(first), self._document_at(last) + 1)]

    def _document_at(self, token: int) -> int:
        """The document that holds a token of the .bin, counted over all sources."""
        if token >= len(self._index.tokens):  # where an empty last source would begin
            return self._index.num_documents
        # `bisect` and not numpy's search: the numbers lie unaligned in the .idx, and numpy would copy them all first.
        sequence = bisect_right(self._index.pointers, token * self._index.dtype.itemsize) - 1
        return bisect_right(self._index.document_indices, sequence) - 1

    def _place(self, document: int) -> DocumentPlace:
        source = bisect_right(self._first_documents, document) - 1
        return DocumentPlace(source, document - self._first_documents[source])
