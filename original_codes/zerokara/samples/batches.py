"""The samples of each data-parallel rank in each step: a pure function; the global batch is the same for any layout.

The position of a run is one integer, the number of samples consumed. The update at position c takes the samples at
positions c … c + G − 1 of the order, G being the global batch. They are dealt out in micro batches of m: of the R
ranks, rank r reads in micro step a the m samples from position c + (a·R + r)·m. So a run that resumes with another
number of ranks or another micro batch reads the same global batches, each sample once.

Example, G = 8, m = 2, R = 2 at position 80: rank 0 reads [80 81] then [84 85], rank 1 [82 83] then [86 87].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara.samples.objective import Batch
from zerokara.samples.order import MixedOrder, SampleOrder
from zerokara.samples.packed_tokens import Samples

SAMPLE_TOKENS = 1 << 22
"""Maximum tokens whose frequencies are counted: their entropy is too low by about half of the ids that occur over the
number of tokens (Miller, 1955), 0.004 nats with 32,000 of them."""


@dataclass(frozen=True)
class BatchLayout:
    """The split of a global batch into data-parallel ranks and gradient-accumulation steps."""

    global_batch_size: int
    micro_batch_size: int
    num_ranks: int = 1

    def __post_init__(self) -> None:
        assert self.global_batch_size % (self.micro_batch_size * self.num_ranks) == 0, self

    def positions(self, consumed: int, rank: int = 0) -> NDArray[np.int64]:
        """Positions that `rank` reads in the update at `consumed`: int64 [gradient-accumulation steps, micro batch]."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} of {self.num_ranks}"
        offsets = np.arange(self.global_batch_size, dtype=np.int64).reshape(-1, self.num_ranks, self.micro_batch_size)
        return consumed + offsets[:, rank]


class Batches:
    """Micro batches of one rank, as an objective makes them of samples and the key of each."""

    def __init__(
        self,
        tokens: Samples,
        order: SampleOrder | MixedOrder,
        layout: BatchLayout,
        objective: Callable[[Any, NDArray[np.int64]], Batch],
        rank: int = 0,
    ):
        assert order.num_samples == len(tokens), f"an order of {order.num_samples} for {len(tokens)} samples"
        self.tokens, self.order, self.layout, self.rank, self._objective = tokens, order, layout, rank, objective

    def at(self, consumed: int) -> Iterator[Batch]:
        """Yield the micro batches of the update at `consumed`."""
        return self._of(self.layout.positions(consumed, self.rank))

    def single_samples(self, consumed: int) -> Iterator[tuple[int, Batch]]:
        """Yield the samples of `at` as batches of one, each with its position."""
        positions = self.layout.positions(consumed, self.rank).reshape(-1, 1)
        yield from zip(positions.ravel().tolist(), self._of(positions), strict=True)

    def _of(self, positions: NDArray[np.int64]) -> Iterator[Batch]:
        _, indices = self.order.at_many(positions.ravel())  # all at once: an order costs more to set up than to ask
        for row, samples in zip(positions, indices.reshape(positions.shape), strict=True):
            # The position is the sample's key: in another epoch the same sample has another one.
            yield self._objective(self.tokens.many(samples), row)


def unigram_entropy(tokens: Samples, objective: Any) -> float:
    """Return the entropy, in nats, of the targets in samples at equal distances, or in all if they are few."""
    number = min(len(tokens), max(1, SAMPLE_TOKENS // tokens.lengths.raw))
    counts = objective.target_counts(tokens.many(np.arange(number) * len(tokens) // number))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
