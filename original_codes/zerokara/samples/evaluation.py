"""Validation tokens in order, each predicted exactly once, so that a loss and its bits per byte are exact.

The stream is [start] + all T tokens, where `start` is the end-of-document token: the first document then begins as
every other does, after one. Window k reads positions k·S … k·S + S − 1 of it and predicts the S that follow each; the
last window is padded, and what is padded does not count. Every process runs the same number of forward passes, the
surplus ones over windows that are all padding, because ZeRO-3 gathers weights in each and would wait for the missing
process for ever.

Example, tokens [7 8 9 4 5], S = 2, start 0: windows [0 7 8], [8 9 4], [4 5 ·], predicting 7 8, 9 4, 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara.samples.objective import Batch, Objective, causal
from zerokara.tokens.indexed import IndexedTokens


class EvaluationTokens:
    """The tokens of one pair of token files (or the first `max_tokens` of them) as windows of `seq_len`."""

    def __init__(self, prefix: Path | str, seq_len: int, start_id: int, max_tokens: int | None = None):
        self.seq_len, self.start_id = seq_len, start_id
        self.tokens: NDArray[Any] = IndexedTokens(prefix).tokens[:max_tokens]
        """The ids that are predicted, in order; their pieces' bytes are the denominator of bits per byte."""
        self.num_tokens = len(self.tokens)
        self.num_windows = -(-self.num_tokens // seq_len)

    def window(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Ids [S + 1] of a window, and whether each is real; beyond the last window none is."""
        ids = np.full(self.seq_len + 1, self.start_id, dtype=np.int64)
        first = index * self.seq_len - 1  # the stream stands one further than the tokens
        piece = self.tokens[max(0, first) : max(0, first + self.seq_len + 1)]
        offset = 1 if index == 0 else 0
        ids[offset : offset + len(piece)] = piece
        real = np.arange(self.seq_len + 1) < (offset + len(piece) if index < self.num_windows else 0)
        return ids, real

    def batches(
        self, micro_batch_size: int, rank: int = 0, num_ranks: int = 1, objective: Objective = causal
    ) -> Iterator[Batch]:
        """The micro batches that `rank` evaluates; as many on every rank."""
        share = micro_batch_size * num_ranks
        for start in range(0, self.num_windows, share):
            first = start + rank * micro_batch_size
            windows = [self.window(index) for index in range(first, first + micro_batch_size)]
            yield objective(np.stack([ids for ids, _ in windows]), np.stack([real for _, real in windows]))
