"""Token files as packed sequences: sample k is ``tokens[k·S : k·S + S + o]``, S tokens and o more of overlap.

The documents of a .bin, each closed by the end-of-document token (EOD), are cut into sequences of S tokens regardless
of where documents end, so there is no padding. In next-token prediction o is 1: position j predicts token j + 1, and
the last token of a sample is the first of the next one. T tokens make (T − o) // S samples.

The tokens of each source (an entry of `input_jsonl`) lie together, in the order of step 2's manifest. Where sources are
mixed by weight, each is cut by itself, so that every sample is of one source; the samples of the second source come
after those of the first. Example, S = 4, o = 1, parts of 10 and 5 tokens: samples 0 and 1 are ``tokens[0:5]`` and
``tokens[4:9]``, sample 2 is ``tokens[10:15]``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zerokara import manifest
from zerokara.config.data import SampleLengths
from zerokara.errors import Fault, UserError
from zerokara.tokens.indexed import IndexedTokens, TokenPaths, bin_path


@dataclass(frozen=True)
class TokenSource:
    """The training tokens of one source."""

    name: str
    """Its entry of `input_jsonl`, as it was when step 2 ran."""
    first_token: int
    """Index of its first token in the .bin."""
    num_tokens: int
    num_valid_tokens: int = 0
    """Tokens of its validation documents, which have another .bin, in the same order."""

    @property
    def end_token(self) -> int:
        """Index of the next source's first token."""
        return self.first_token + self.num_tokens


def read_sources(output_prefix: str) -> tuple[TokenSource, ...]:
    """Read the sources from the manifest of step 2, and check that together they make up the .bin.

    Raises UserError if step 2 has not finished, or its manifest and the .bin disagree.
    """
    paths = TokenPaths(output_prefix)
    num_tokens = len(IndexedTokens(paths.train).tokens)
    sources, expected = list[TokenSource](), 0
    for each in manifest.read(paths.manifest).facts.get("sources", []):
        valid_tokens = each.get("valid", {}).get("tokens", 0)
        sources.append(TokenSource(each["entry"], expected, each["train"]["tokens"], valid_tokens))
        expected = sources[-1].end_token
    if num_tokens != expected:
        rule = f"lists {expected:,} training tokens; {bin_path(paths.train)} holds {num_tokens:,}"
        raise UserError(Fault(str(paths.manifest), rule, remedy="tokenize again: step 2 with --redo"))
    return tuple(sources)


def document_bounds(index: IndexedTokens) -> NDArray[np.int64]:
    """Return the beginning of each document in the .bin, and the end of the last, in tokens: [documents + 1]."""
    by_sequence = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])
    return by_sequence[index.document_indices]


class Samples(Protocol):
    """Training samples by number: `PackedTokens` of a corpus, `PackedExamples` of a task."""

    lengths: SampleLengths
    num_tokens: int

    def __len__(self) -> int: ...

    def many(self, indices: NDArray[np.int64]) -> Any:
        """Return the samples at `indices`, as their objective takes them."""


class PackedTokens:
    """The samples of one .bin and .idx, memory-mapped.

    `where` is the place of `seq_len` (``config.yaml:31``), for a fault; `parts` are the numbers of tokens of the parts
    that are cut each by itself, None is a single part.

    Raises UserError if the files are missing or damaged, or hold less than one sequence.
    """

    def __init__(self, prefix: Path | str, lengths: SampleLengths, where: str = "", parts: Sequence[int] | None = None):
        self.lengths, self._index = lengths, IndexedTokens(prefix)
        self.num_tokens = len(self._index.tokens)
        parts = [self.num_tokens] if parts is None else parts
        assert sum(parts) == self.num_tokens, f"parts of {sum(parts)} tokens of {self.num_tokens}"
        self._first_samples = [0, *accumulate(map(lengths.samples_in, parts))]
        self._first_tokens = [0, *accumulate(parts)]
        if not len(self):
            data, remedy = str(bin_path(self._index.prefix)), "give more text (step 2)"
            rule = f"{data} holds {self.num_tokens:,} tokens, and one sequence takes {lengths.requirement}"
            if self.num_tokens > lengths.overlap:
                longest = lengths.input * (self.num_tokens - lengths.overlap) // lengths.raw
                remedy += f", or set seq_len to at most {longest:,}"
            raise UserError(Fault(where or data, rule, "seq_len", lengths.input, remedy=remedy))

    def __len__(self) -> int:
        return self._first_samples[-1]

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return sample `index`: int64 [S + o]."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = self.first_token(index)
        return self._index.tokens[start : start + self.lengths.raw + self.lengths.overlap].astype(np.int64)

    def first_token(self, index: int) -> int:
        """Index in the .bin of the first token of sample `index`."""
        part = bisect_right(self._first_samples, index) - 1
        return self._first_tokens[part] + (index - self._first_samples[part]) * self.lengths.raw

    def many(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at `indices`: int64 [len(indices), S + o]."""
        return np.stack([self[int(index)] for index in indices])

    def documents(self, index: int, sources: Sequence[TokenSource]) -> list[tuple[int, int]]:
        """Return the documents of which sample `index` holds a token (an EOD is one), by binary search in the .idx.

        Each is the index of its source, and its own among the source's training documents.
        """
        firsts, start = [self._document_at(source.first_token) for source in sources], self.first_token(index)
        last, documents = start + self.lengths.raw + self.lengths.overlap - 1, []
        for document in range(self._document_at(start), self._document_at(last) + 1):
            source = bisect_right(firsts, document) - 1
            documents.append((source, document - firsts[source]))
        return documents

    def _document_at(self, token: int) -> int:
        """Return the document that holds a token of the .bin, counted over all sources."""
        if token >= self.num_tokens:  # where an empty last source would begin
            return self._index.num_documents
        # `bisect` and not numpy's search: the numbers lie unaligned in the .idx, and numpy would copy them all first.
        sequence = bisect_right(self._index.pointers, token * self._index.dtype.itemsize) - 1
        return bisect_right(self._index.document_indices, sequence) - 1
