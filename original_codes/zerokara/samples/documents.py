"""The documents in a training sample: index of the sample → (source, index of the document in the source).

Documents are counted from 0 among the training documents of their source, in the order of the corpus. A sample holds
every document of which it has a token, the end-of-document token included. A binary search in the .idx finds them with
a few dozen reads, even in a terabyte.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from zerokara.samples.packed import PackedTokens
from zerokara.samples.sources import TokenSource
from zerokara.tokens.indexed import IndexedTokens


@dataclass(frozen=True)
class DocumentId:
    """One training document."""

    source: int
    """Index of the source."""
    document: int
    """Index among the source's training documents."""


class SampleDocuments:
    """The documents of the samples of one pair of token files."""

    def __init__(self, samples: PackedTokens, sources: Sequence[TokenSource]):
        self._samples, self._sources = samples, sources
        self._index = IndexedTokens(samples.prefix)
        self._first_documents = [self._document_at(source.first_token) for source in sources]

    def in_sample(self, sample: int) -> list[DocumentId]:
        """The documents of which sample number `sample` holds a token, in order."""
        first = self._samples.first_token(sample)
        last = first + self._samples.lengths.raw + self._samples.lengths.overlap - 1
        return [self._id(document) for document in range(self._document_at(first), self._document_at(last) + 1)]

    def _document_at(self, token: int) -> int:
        """The document that holds a token of the .bin, counted over all sources."""
        if token >= len(self._index.tokens):  # where an empty last source would begin
            return self._index.num_documents
        # `bisect` and not numpy's search: the numbers lie unaligned in the .idx, and numpy would copy them all first.
        sequence = bisect_right(self._index.pointers, token * self._index.dtype.itemsize) - 1
        return bisect_right(self._index.document_indices, sequence) - 1

    def _id(self, document: int) -> DocumentId:
        source = bisect_right(self._first_documents, document) - 1
        return DocumentId(source, document - self._first_documents[source])
