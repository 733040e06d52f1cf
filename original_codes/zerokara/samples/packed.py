"""Token files as packed sequences: sample k is ``tokens[k·S : k·S + S + o]``, S tokens and o more of overlap.

The documents of a .bin follow one another, each closed by the end-of-document token (EOD), and are cut into sequences
of S tokens regardless of where documents end, so there is no padding. In next-token prediction o is 1: position j
predicts token j + 1, and the last token of a sample is the first of the next one. T tokens make (T − o) // S samples;
at most S tokens at the end are not used.

Where sources are mixed by weight, each is cut by itself, so that every sample is of one source; the samples of the
second source come after those of the first. Example, S = 4, o = 1, parts of 10 and 5 tokens: samples 0 and 1 are
``tokens[0:5]`` and ``tokens[4:9]``, sample 2 is ``tokens[10:15]``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara.config.data import SampleLengths
from zerokara.errors import Fault, UserError
from zerokara.tokens.indexed import IndexedTokens
from zerokara.tokens.layout import bin_path


class PackedTokens:
    """The samples of one .bin and .idx; memory-mapped, so nothing is read before it is asked for."""

    def __init__(self, prefix: Path | str, lengths: SampleLengths, where: str = "", parts: Sequence[int] | None = None):
        """`where` is the place of `seq_len` (``config.yaml:31``), for a fault.

        `parts` are the numbers of tokens of the parts that are cut each by itself; None is a single part.

        Raises:
            UserError: the files are missing or damaged, or hold less than one sequence.
        """
        self.prefix, self.lengths = Path(prefix), lengths
        self._tokens: NDArray[Any] = IndexedTokens(self.prefix).tokens
        self.num_tokens = len(self._tokens)
        parts = [self.num_tokens] if parts is None else parts
        assert sum(parts) == self.num_tokens, f"parts of {sum(parts)} tokens of {self.num_tokens}"
        self.samples_per_part = [lengths.samples_in(part) for part in parts]
        self.num_samples = sum(self.samples_per_part)
        self._first_samples = [0, *accumulate(self.samples_per_part)][:-1]
        self._first_tokens = [0, *accumulate(parts)][:-1]
        if not self.num_samples:
            raise UserError(self._too_short(where))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Sample `index`: int64 [S + o]."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        start = self.first_token(index)
        return self._tokens[start : start + self.lengths.raw + self.lengths.overlap].astype(np.int64)

    def first_token(self, index: int) -> int:
        """Index in the .bin of the first token of sample `index`."""
        part = bisect_right(self._first_samples, index) - 1
        return self._first_tokens[part] + (index - self._first_samples[part]) * self.lengths.raw

    def many(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at `indices`: int64 [len(indices), S + o]."""
        return np.stack([self[int(index)] for index in indices])

    def _too_short(self, where: str) -> Fault:
        taken, overlap = self.lengths.raw, self.lengths.overlap
        remedy = "give more text (step 2)"
        if self.num_tokens > overlap:
            remedy += f", or set seq_len to at most {self.lengths.input * (self.num_tokens - overlap) // taken:,}"
        return Fault(
            where=where or str(bin_path(self.prefix)),
            key="seq_len",
            value=self.lengths.input,
            rule=f"{bin_path(self.prefix)} holds {self.num_tokens:,} tokens, and one sequence takes "
            f"{self.lengths.requirement}",
            remedy=remedy,
        )
