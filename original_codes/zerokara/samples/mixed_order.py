"""The order of a run that mixes sources by weight, in stages: position of the run → (epoch of the source, sample).

Position i lies in a stage, which determines its source and the number d of the draw from that source. Draws are counted
over the whole run, through all stages, so that no sample of a source is read twice before all were read once: draw d of
a source of n samples lies in its epoch d // n, at index d mod n of the epoch, shuffled or not like `order.SampleOrder`
with a seed of its own for each source. Only a stage of the other order ends an epoch early: it restarts the source,
since neither order can continue where the other stopped. So a stage in `sequential` order reads a source from its
beginning, whatever shuffled stages have read of it.

The sources of a stage's positions are the seats of `apportionment`. In `sequential` order they are used as they are:
every source is read in its own order, evenly mixed. In `shuffle` order they are shuffled within blocks of 1,024
positions: at the end of a block every source has been read in proportion to its weight, and within a block there is no
pattern. The last block of a stage of known length is cut short, so that the stage has exactly the seats of its length.
The last stage may be open: then a longer run keeps the prefix of a shorter one.

A block is computed on demand, and a few are kept: memory grows neither with the data nor with the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara.config.data import OrderKind
from zerokara.samples.apportionment import Apportionment
from zerokara.samples.order import KeyedPermutation, SampleOrder, mix

BLOCK_SAMPLES = 1024
"""Positions that are shuffled among each other."""
_BLOCKS_KEPT = 8
_STAGE_SEEDS, _SOURCE_SEEDS = 1, 2


@dataclass(frozen=True)
class MixedStage:
    """One stage of a mixture."""

    weights: tuple[int, ...]
    """A whole number for each source."""
    num_samples: int | None
    """None for a last stage that is as long as the run."""
    kind: OrderKind
    name: str = ""

    def as_json(self) -> dict[str, Any]:
        """All that determines the order; the name does not."""
        return {"weights": list(self.weights), "samples": self.num_samples, "order": self.kind}


def derived_seed(seed: int, family: int, number: int) -> int:
    """An independent seed for each of many things to shuffle."""
    return mix(mix(mix(seed) + family) + number)


class _Draws:
    """The source of each position of one stage, and the number of the draw from that source."""

    def __init__(self, stage: MixedStage, number: int, first: int, before: Sequence[int], seed: int):
        self.stage, self.first, self.before = stage, first, list(before)
        self._seats = Apportionment(stage.weights)
        self._seed = derived_seed(seed, _STAGE_SEEDS, number)
        self._blocks: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def counts(self, num: int) -> list[int]:
        """How many of the stage's first `num` positions each source has."""
        if self.stage.kind == "sequential" or num % BLOCK_SAMPLES == 0 or num == self.stage.num_samples:
            return self._seats.seats(num)
        number, rest = divmod(num, BLOCK_SAMPLES)
        counts = self._seats.seats(num - rest)
        in_block = np.bincount(self._block(number)[0][:rest], minlength=len(counts))
        return [count + more for count, more in zip(counts, in_block.tolist(), strict=True)]

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and draw of each of `positions`, counted from the beginning of the stage."""
        sources, draws = np.empty_like(positions), np.empty_like(positions)
        numbers, offsets = np.divmod(positions, BLOCK_SAMPLES)
        for number in np.unique(numbers):
            here = numbers == number
            block_sources, block_draws = self._block(int(number))
            sources[here], draws[here] = block_sources[offsets[here]], block_draws[offsets[here]]
        return sources, draws

    def _block(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if number not in self._blocks:
            while len(self._blocks) >= _BLOCKS_KEPT:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = self._make_block(number)
        return self._blocks[number]

    def _make_block(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        first, size = number * BLOCK_SAMPLES, BLOCK_SAMPLES
        if self.stage.num_samples is not None:
            size = min(size, self.stage.num_samples - first)
        sources = np.array(self._seats.sequence(first, size), dtype=np.int64)
        if self.stage.kind == "shuffle":
            sources = sources[KeyedPermutation(size, self._seed, number).at(np.arange(size))]
        draws = np.empty_like(sources)
        for source, count in enumerate(self._seats.seats(first)):
            of_source = np.flatnonzero(sources == source)
            draws[of_source] = self.before[source] + count + np.arange(len(of_source))
        return sources, draws


class MixedOrder:
    """The declared order of a run in stages over sources of `samples_per_source` samples."""

    def __init__(self, stages: Sequence[MixedStage], samples_per_source: Sequence[int], seed: int):
        assert stages and all(stage.num_samples is not None for stage in stages[:-1]), stages
        self.samples_per_source = tuple(samples_per_source)
        self.num_samples = sum(samples_per_source)
        self._first_samples = np.concatenate([[0], np.cumsum(samples_per_source)]).astype(np.int64)
        self._draws: list[_Draws] = []
        first, before = 0, [0] * len(self.samples_per_source)
        kinds: list[OrderKind | None] = [None] * len(self.samples_per_source)
        for number, stage in enumerate(stages):
            for source in np.flatnonzero(stage.weights).tolist():
                num_read = before[source] % self.samples_per_source[source]
                if num_read and kinds[source] != stage.kind:  # the rest of the epoch is left out
                    before[source] += self.samples_per_source[source] - num_read
                kinds[source] = stage.kind
            self._draws.append(_Draws(stage, number, first, before, seed))
            if stage.num_samples is not None:
                seats = self._draws[-1].counts(stage.num_samples)
                first, before = first + stage.num_samples, [a + b for a, b in zip(before, seats, strict=True)]
        self.length: int | None = None if stages[-1].num_samples is None else first
        """Number of positions; None if the last stage is open."""
        self.firsts = [draws.first for draws in self._draws]
        """First position of each stage."""
        self._orders: dict[tuple[int, OrderKind], SampleOrder] = {
            (source, kind): SampleOrder(samples, derived_seed(seed, _SOURCE_SEEDS, source), kind)
            for source, samples in enumerate(self.samples_per_source)
            for kind in ("shuffle", "sequential")
            if samples
        }

    def at_many(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Epochs of their sources, and indices among the samples of all sources, of the samples at `positions`.

        The positions have one dimension, and may be in any order and in any stages.
        """
        assert self.length is None or not len(positions) or positions.max() < self.length, "beyond the last stage"
        epochs, indices = np.empty_like(positions), np.empty_like(positions)
        numbers = np.searchsorted(self.firsts, positions, side="right") - 1
        for number in np.unique(numbers):
            in_stage = np.flatnonzero(numbers == number)
            stage = self._draws[number]
            sources, draws = stage.at(positions[in_stage] - stage.first)
            for source in np.unique(sources):
                here = sources == source
                epochs[in_stage[here]], own = self._orders[int(source), stage.stage.kind].at_many(draws[here])
                indices[in_stage[here]] = self._first_samples[source] + own
        return epochs, indices

    def counts_by_stage(self, num: int) -> list[list[int]]:
        """Of the first `num` positions of the run, how many each stage draws from each source."""
        ends = [*self.firsts[1:], num]
        parts = [min(end, num) - draws.first for draws, end in zip(self._draws, ends, strict=True)]
        return [draws.counts(max(0, part)) for draws, part in zip(self._draws, parts, strict=True)]

    def counts(self, num: int) -> list[int]:
        """Of the first `num` positions of the run, how many are drawn from each source."""
        return [sum(column) for column in zip(*self.counts_by_stage(num), strict=True)]
