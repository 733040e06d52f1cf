"""Validation tokens in order, so that a loss and its bits per byte are exact.

Where each token is predicted from those before it (`PredictedOnce`), each is predicted exactly once. The stream is
[start] + all T tokens, where `start` is the end-of-document token: the first document then begins as every other does,
after one. Window k reads positions k·S … k·S + S − 1 of it and predicts the S that follow each; the last window is
padded, and what is padded does not count. The tokens may lie in parts (sources, one after another). Windows do not
mind; a batch whose windows reach from one part into the next is given once for each, so that what is predicted in the
others does not count.

Where samples are texts with gaps (`WholeSamples`), each part is cut into whole ones, the last filled up from the part's
beginning; the gaps belong to the seed and the sample's number, so that every validation asks for the same words.

Every process runs the same number of forward passes, the surplus ones over windows that do not count, because ZeRO-3
gathers weights in each and would wait for the missing process for ever.

Example, tokens [7 8 9 4 5], S = 2, start 0: windows [0 7 8], [8 9 4], [4 5 ·], predicting 7 8, 9 4, 5. With parts of 3
and 2 tokens window 1 counts 9 for part 0, and 4 for part 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zerokara.samples.objective import Batch, Objective
from zerokara.tokens.indexed import IndexedTokens


class EvaluationBatches(Protocol):
    """What a validation asks for."""

    num_parts: int

    def batches(self, micro_batch_size: int, rank: int = 0, num_ranks: int = 1) -> Iterator[tuple[int, Batch]]:
        """The micro batches that `rank` evaluates, each with the part of which it counts; as many on every rank."""
        ...


def evaluation_batches(
    prefix: Path | str,
    objective: Objective,
    start_id: int,
    max_tokens: int | None = None,
    part_tokens: Sequence[int] = (),
) -> EvaluationBatches:
    """The tokens of one pair of token files (or the first `max_tokens` of them), as an objective is evaluated.

    `part_tokens` are the tokens of each part, all of them together; empty where there is one part. Of several parts
    `max_tokens` takes the beginning of each, in proportion, up to the end of a document.
    """
    there = IndexedTokens(prefix).tokens
    lengths = list(part_tokens) or [len(there)]
    assert sum(lengths) == len(there), f"parts of {sum(lengths)} tokens for {len(there)}"
    taken = _taken(there, lengths, start_id, max_tokens)
    return PredictedOnce(taken, objective, start_id) if objective.lengths.overlap else WholeSamples(taken, objective)


class WholeSamples:
    """The tokens of each part as whole samples."""

    def __init__(self, parts: Sequence[NDArray[Any]], objective: Objective):
        self._parts, self._objective = parts, objective
        self.num_parts = len(parts)

    def batches(self, micro_batch_size: int, rank: int = 0, num_ranks: int = 1) -> Iterator[tuple[int, Batch]]:
        """The micro batches that `rank` evaluates, each with the part of which it counts; as many on every rank."""
        taken, key = self._objective.lengths.raw, 0
        for number, part in enumerate(self._parts):
            num_samples = -(-len(part) // taken)
            for start in range(0, num_samples, micro_batch_size * num_ranks):
                places = start + rank * micro_batch_size + np.arange(micro_batch_size)
                tokens = part[(places[:, None] * taken + np.arange(taken)) % len(part)].astype(np.int64)
                real = np.repeat((places < num_samples)[:, None], taken, axis=1)
                yield number, self._objective(tokens, key + places, real)
            key += num_samples


class PredictedOnce:
    """The tokens as windows, in which each token is predicted once."""

    def __init__(self, taken: Sequence[NDArray[Any]], objective: Objective, start_id: int):
        """`taken` are the tokens of each part; `start_id` stands before the first."""
        self._objective, self.seq_len, self.start_id = objective, objective.lengths.raw, start_id
        self.tokens: NDArray[Any] = taken[0] if len(taken) == 1 else np.concatenate(taken)
        """The ids that are predicted, in order; their pieces' bytes are the denominator of bits per byte."""
        self.num_tokens = len(self.tokens)
        self.num_windows = -(-self.num_tokens // self.seq_len)
        bounds = np.cumsum([0, *map(len, taken)]).tolist()
        self.parts: list[tuple[int, int]] = list(pairwise(bounds))
        """First token and end of each part."""
        self.num_parts = len(self.parts)

    def window(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Ids [S + 1] of a window, and whether each is real; beyond the last window none is."""
        ids = np.full(self.seq_len + 1, self.start_id, dtype=np.int64)
        first = index * self.seq_len - 1  # the stream stands one further than the tokens
        piece = self.tokens[max(0, first) : max(0, first + self.seq_len + 1)]
        offset = 1 if index == 0 else 0
        ids[offset : offset + len(piece)] = piece
        real = np.arange(self.seq_len + 1) < (offset + len(piece) if index < self.num_windows else 0)
        return ids, real

    def batches(self, micro_batch_size: int, rank: int = 0, num_ranks: int = 1) -> Iterator[tuple[int, Batch]]:
        """The micro batches that `rank` evaluates, each with the part of which it counts; as many on every rank."""
        share = micro_batch_size * num_ranks
        for start in range(0, self.num_windows, share):
            first = start + rank * micro_batch_size
            numbers = np.arange(first, first + micro_batch_size)
            windows = [self.window(int(index)) for index in numbers]
            ids, real = (np.stack(arrays) for arrays in zip(*windows, strict=True))
            # The token that stands at each place of the windows; the place before the first token holds none.
            places = numbers[:, None] * self.seq_len + np.arange(-1, self.seq_len)
            for number, (part_first, part_end) in enumerate(self.parts):
                # The same on every rank: it is asked of the windows of all.
                if part_first < (start + share) * self.seq_len and part_end > max(part_first, start * self.seq_len):
                    yield number, self._objective(ids, numbers, real & (places >= part_first) & (places < part_end))


def _taken(there: NDArray[Any], lengths: Sequence[int], end_id: int, max_tokens: int | None) -> list[NDArray[Any]]:
    """The tokens of each part that are read."""
    parts = np.split(there, np.cumsum(lengths)[:-1])
    if max_tokens is None or max_tokens >= len(there):
        return [there] if len(parts) == 1 else parts
    if len(parts) == 1:
        return [there[:max_tokens]]
    found = []
    for part in parts:
        share = part[: max_tokens * len(part) // len(there)]
        ends = np.flatnonzero(share == end_id)
        found.append(share[: ends[-1] + 1] if len(ends) else share)
    return found
