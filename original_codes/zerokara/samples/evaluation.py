"""Validation batches, in the order of the tokens, so that the loss and bits per byte are exact.

In next-token prediction (`WindowBatches`) each token is predicted exactly once. The stream is [start] + all T tokens,
where `start` is the end-of-document token, so that the first document follows one as every other does. Window k has the
inputs k·S … k·S + S − 1 of it and predicts the token after each; the last window is padded, and padding is masked out
of the loss. The tokens may come in parts (sources, one after another). A batch whose windows reach from one part into
the next is yielded once for each part, with the others' predictions masked out.

In span corruption (`SampleBatches`) each part is cut into whole samples, the last filled up from the beginning of the
part; the masked spans depend on the seed and the sample's number, so that every validation masks the same tokens.

Every rank runs the same number of forward passes, the surplus ones over windows that do not count: ZeRO-3 gathers the
weights in each, and would wait for a missing rank for ever.

Example, tokens [7 8 9 4 5], S = 2, start 0: windows [0 7 8], [8 9 4], [4 5 ·], predicting 7 8, 9 4, 5. With parts of 3
and 2 tokens window 1 counts 9 for part 0, and 4 for part 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara.samples.objective import Batch, Objective
from zerokara.tokens.indexed import IndexedTokens


def evaluation_batches(
    prefix: Path | str,
    objective: Objective,
    start_id: int,
    max_tokens: int | None = None,
    part_tokens: Sequence[int] = (),
) -> WindowBatches | SampleBatches:
    """The batches of a validation file (or of its first `max_tokens` tokens), as the objective needs them.

    `part_tokens` are the numbers of tokens of the parts; empty for a single part. `max_tokens` takes the beginning of
    each part, in proportion, up to the end of a document.
    """
    tokens = IndexedTokens(prefix).tokens
    lengths = list(part_tokens) or [len(tokens)]
    assert sum(lengths) == len(tokens), f"parts of {sum(lengths)} tokens for {len(tokens)}"
    parts = _first_tokens(tokens, lengths, start_id, max_tokens)
    return WindowBatches(parts, objective, start_id) if objective.lengths.overlap else SampleBatches(parts, objective)


class SampleBatches:
    """Whole samples of each part."""

    def __init__(self, parts: Sequence[NDArray[Any]], objective: Objective):
        self._parts, self._objective = parts, objective
        self.num_parts = len(parts)

    def batches(self, micro_batch_size: int, rank: int = 0, num_ranks: int = 1) -> Iterator[tuple[int, Batch]]:
        """The micro batches that `rank` evaluates, each with the part that it counts for; as many on every rank."""
        raw, key = self._objective.lengths.raw, 0
        for number, part in enumerate(self._parts):
            num_samples = -(-len(part) // raw)
            for start in range(0, num_samples, micro_batch_size * num_ranks):
                samples = start + rank * micro_batch_size + np.arange(micro_batch_size)
                tokens = part[(samples[:, None] * raw + np.arange(raw)) % len(part)].astype(np.int64)
                real = np.repeat((samples < num_samples)[:, None], raw, axis=1)
                yield number, self._objective(tokens, key + samples, real)
            key += num_samples


class WindowBatches:
    """Consecutive windows, in which each token is predicted exactly once."""

    def __init__(self, parts: Sequence[NDArray[Any]], objective: Objective, start_id: int):
        """`parts` are the tokens of each part; `start_id` precedes the first."""
        self._objective, self.seq_len, self.start_id = objective, objective.lengths.raw, start_id
        self.tokens: NDArray[Any] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        """The predicted ids in order; the bytes of their pieces are the denominator of bits per byte."""
        self.num_tokens = len(self.tokens)
        self.num_windows = -(-self.num_tokens // self.seq_len)
        bounds = np.cumsum([0, *map(len, parts)]).tolist()
        self.parts: list[tuple[int, int]] = list(pairwise(bounds))
        """First token and end of each part."""
        self.num_parts = len(self.parts)

    def window(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Ids [S + 1] of a window, and whether each is real rather than padding; beyond the last window none is."""
        ids = np.full(self.seq_len + 1, self.start_id, dtype=np.int64)
        first = index * self.seq_len - 1  # the stream is the tokens shifted by one
        tokens = self.tokens[max(0, first) : max(0, first + self.seq_len + 1)]
        offset = 1 if index == 0 else 0
        ids[offset : offset + len(tokens)] = tokens
        real = np.arange(self.seq_len + 1) < (offset + len(tokens) if index < self.num_windows else 0)
        return ids, real

    def batches(self, micro_batch_size: int, rank: int = 0, num_ranks: int = 1) -> Iterator[tuple[int, Batch]]:
        """The micro batches that `rank` evaluates, each with the part that it counts for; as many on every rank."""
        share = micro_batch_size * num_ranks
        for start in range(0, self.num_windows, share):
            first = start + rank * micro_batch_size
            numbers = np.arange(first, first + micro_batch_size)
            windows = [self.window(int(index)) for index in numbers]
            ids, real = (np.stack(arrays) for arrays in zip(*windows, strict=True))
            # Index of the token at each position of the windows; -1 for the start token.
            positions = numbers[:, None] * self.seq_len + np.arange(-1, self.seq_len)
            for number, (part_first, part_end) in enumerate(self.parts):
                # The same on every rank: it depends on the windows of all ranks.
                if part_first < (start + share) * self.seq_len and part_end > max(part_first, start * self.seq_len):
                    yield (
                        number,
                        self._objective(ids, numbers, real & (positions >= part_first) & (positions < part_end)),
                    )


def _first_tokens(
    tokens: NDArray[Any], lengths: Sequence[int], end_id: int, max_tokens: int | None
) -> list[NDArray[Any]]:
    """The tokens of each part that are validated."""
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    if max_tokens is None or max_tokens >= len(tokens):
        return [tokens] if len(parts) == 1 else parts
    if len(parts) == 1:
        return [tokens[:max_tokens]]
    beginnings = []
    for part in parts:
        share = part[: max_tokens * len(part) // len(tokens)]
        ends = np.flatnonzero(share == end_id)
        beginnings.append(share[: ends[-1] + 1] if len(ends) else share)
    return beginnings
