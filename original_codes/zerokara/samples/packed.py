"""Token files as packed sequences: sample k is ``tokens[k·S : k·S + S + 1]``.

The documents of a .bin stand one after the other, each closed by the end-of-document token (EOD), and are cut into
sequences of S tokens regardless of where documents end, so no token is padding. Each sample holds one token more than
S: position j predicts token j + 1, and the last token of a sample is the first that the next one reads. Of T tokens,
(T − 1) // S samples are made; at most S tokens at the end go unread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara.errors import Fault, UserError
from zerokara.tokens.indexed import IndexedTokens
from zerokara.tokens.layout import bin_path


def num_samples(num_tokens: int, seq_len: int) -> int:
    """Samples that `num_tokens` make."""
    return max(0, (num_tokens - 1) // seq_len)


class PackedTokens:
    """The samples of one pair of token files; memory-mapped, so nothing is read before it is asked for."""

    def __init__(self, prefix: Path | str, seq_len: int, where: str = ""):
        """`where` names the place of `seq_len` (``config.yaml:31``) in the message of an error.

        Raises:
            UserError: the files are missing or damaged, or hold less than one sequence.
        """
        self.prefix, self.seq_len = Path(prefix), seq_len
        self._tokens: NDArray[Any] = IndexedTokens(self.prefix).tokens
        self.num_tokens = len(self._tokens)
        self.num_samples = num_samples(self.num_tokens, seq_len)
        if not self.num_samples:
            raise UserError(self._too_short(where))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Sample `index`: int64 [S + 1]."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        start = index * self.seq_len
        return self._tokens[start : start + self.seq_len + 1].astype(np.int64)

    def many(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at `indices`: int64 [len(indices), S + 1]."""
        return np.stack([self[int(index)] for index in indices])

    def _too_short(self, where: str) -> Fault:
        remedy = "give more text (step 2)"
        if self.num_tokens >= 2:
            remedy += f", or set seq_len to at most {self.num_tokens - 1:,}"
        return Fault(
            where=where or str(bin_path(self.prefix)),
            key="seq_len",
            found=self.seq_len,
            rule=f"{bin_path(self.prefix)} holds {self.num_tokens:,} tokens, and one sequence takes "
            f"seq_len + 1 = {self.seq_len + 1:,}",
            remedy=remedy,
        )
