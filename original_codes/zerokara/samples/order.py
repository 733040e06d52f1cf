"""The order in which a run reads its samples, a pure function: position of the run → (epoch, index of the sample).

`SampleOrder` is the order of one stream of samples, `MixedOrder` that of several sources, mixed by weight in stages.
Nothing is stored: every process computes the same order at any position, and a longer run keeps the prefix of a shorter
one. All pseudo-random numbers are SplitMix64's (`tokens.held_out`).
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from zerokara.config.data import OrderKind
from zerokara.tokens.held_out import splitmix64

NUM_ROUNDS = 8
"""4 make a strong permutation of a large set (Luby and Rackoff, 1988); sets of a few bits need more."""
MIN_HALF_BITS = 3
"""Halves below 3 bits have so few round functions that some permutations of 3 or 4 samples never come."""
BLOCK_SAMPLES = 1024
"""Positions of a mixture that are shuffled among each other."""
_STAGE_SEEDS, _SOURCE_SEEDS, CUT_SEEDS = 1, 2, 3

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, an odd number whose multiples spread evenly over 64 bits."""


def mix(value: int) -> int:
    """`splitmix64` of one value, modulo 2^64."""
    return int(splitmix64(np.array([value % (1 << 64)], dtype=np.uint64))[0])


def derived_seed(seed: int, family: int, number: int) -> int:
    """Derive an independent seed for each permutation."""
    return mix(mix(mix(seed) + family) + number)


class KeyedPermutation:
    """A pseudo-random permutation of [0, n), fixed by (seed, epoch) and computed point by point, in O(1) memory.

    It is a Feistel network over the smallest even number of bits that holds n, walked along its cycle until the value
    is below n (J. Black, P. Rogaway: Ciphers with Arbitrary Finite Domains, 2002). A Feistel network is a permutation
    whatever its round function is, since each round can be undone. With G = `GOLDEN`, all modulo 2^64::

        state   = mix(mix(seed + G) + epoch)
        key_r   = mix(state + (r + 1)·G)                    for the rounds r = 0 … 7
        round_r : (left, right) → (right, left XOR the top `half` bits of mix(right XOR key_r))
    """

    def __init__(self, n: int, seed: int, epoch: int = 0):
        assert n >= 1, f"a permutation of {n} numbers"
        self.n = n
        self._half_bits = max(MIN_HALF_BITS, -(-(n - 1).bit_length() // 2))
        state = mix(mix(seed + GOLDEN) + epoch)
        self._keys = splitmix64(np.uint64(state) + np.arange(1, NUM_ROUNDS + 1, dtype=np.uint64) * np.uint64(GOLDEN))

    def at(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the images of `indices` (in [0, n), one dimension)."""
        values = self._once(indices.astype(np.uint64))
        outside = np.flatnonzero(values >= self.n)
        while len(outside):  # a value meets one below n after 4 steps on average at worst (n ≥ 16)
            values[outside] = self._once(values[outside])
            outside = outside[values[outside] >= self.n]
        return values.astype(np.int64)

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Apply the Feistel network, a permutation of [0, 4^half_bits)."""
        half, top = np.uint64(self._half_bits), np.uint64(64 - self._half_bits)
        left, right = values >> half, values & np.uint64((1 << self._half_bits) - 1)
        for key in self._keys:
            left, right = right, left ^ (splitmix64(right ^ key) >> top)
        return (left << half) | right


class SampleOrder:
    """The declared order of a run over n samples an epoch: position i lies in epoch i // n, at i mod n of the epoch.

    In `sequential` order that is the index of the sample, in `shuffle` order its image under the epoch's permutation.
    """

    def __init__(self, num_samples: int, seed: int, kind: OrderKind = "shuffle"):
        assert num_samples >= 1, f"an order of {num_samples} samples"
        assert kind in ("shuffle", "sequential"), kind
        self.num_samples, self.seed, self.kind = num_samples, seed, kind

    def at_many(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return epochs and indices of the samples at `positions` (one dimension, in any order, over any epochs)."""
        epochs, indices = np.divmod(positions, self.num_samples)
        if self.kind == "shuffle":
            for epoch in np.unique(epochs):
                here = epochs == epoch
                indices[here] = KeyedPermutation(self.num_samples, self.seed, int(epoch)).at(indices[here])
        return epochs, indices


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Smallest whole numbers in the same proportion; 0.1 is a tenth, not its nearest binary fraction."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole) or 1
    return tuple(weight // divisor for weight in whole)


class Apportionment:
    """The source of each position of a mixture, so that every prefix of it has the proportions of the weights.

    The positions are seats, assigned by the method of Webster and Sainte-Laguë (Balinski, Young: Fair Representation,
    1982): the seats of source s have the keys (2n + 1) / w_s for n = 0, 1, 2, …, and all seats are given in ascending
    order of key, then of source. So of the first p seats source s has about w_s·p / Σw, and exactly that where these
    are whole numbers. Keys are made whole by the least common multiple of the weights.

    Example, weights 3 and 1: the keys are 1/3, 1, 5/3, 7/3, … and 1, 3, 5, …; the seats go to 0 0 1 0 0 0 1 0 0 0 …
    """

    def __init__(self, weights: Sequence[int]):
        assert min(weights) >= 0 and sum(weights) > 0, weights
        self.weights = tuple(weights)
        multiple = math.lcm(*(weight for weight in weights if weight))
        self._steps = [multiple // weight if weight else 0 for weight in weights]

    def seats(self, num: int) -> list[int]:
        """Number of the first `num` seats that each source has, in a time that does not grow with `num`.

        Each source first gets what it has for certain: with 1/λ the key of the last seat, over 2, it has
        round(w/λ) seats, these sum to `num`, and rounding adds at most 1/2 for each of the k sources, so that
        1/λ ≥ (num − k/2) / Σw. Fewer than k seats remain, and go to the lowest keys.
        """
        total, off = sum(self.weights), sum(weight > 0 for weight in self.weights)
        counts = [max(0, (weight * (2 * num - off) + total) // (2 * total)) for weight in self.weights]
        self._give(counts, num - sum(counts))
        return counts

    def sequence(self, first: int, num: int) -> list[int]:
        """Return the source of each of the `num` seats from seat `first` on."""
        return self._give(self.seats(first), num)

    def _give(self, counts: list[int], num: int) -> list[int]:
        """Give the next `num` seats to the lowest keys, count them, and return their sources."""
        waiting = [((2 * counts[source] + 1) * step, source) for source, step in enumerate(self._steps) if step]
        heapq.heapify(waiting)
        sources = []
        for _ in range(num):
            source = waiting[0][1]
            sources.append(source)
            counts[source] += 1
            heapq.heapreplace(waiting, ((2 * counts[source] + 1) * self._steps[source], source))
        return sources


@dataclass(frozen=True)
class MixedStage:
    weights: tuple[int, ...]
    num_samples: int | None
    """None for a last stage that is as long as the run."""
    kind: OrderKind
    name: str = ""


class _Draws:
    """The source of each position of one stage, and the number of the draw from that source.

    In `sequential` order the sources are the seats of an `Apportionment`, evenly mixed. In `shuffle` order they are
    shuffled within blocks of 1,024 positions, so that at the end of a block every source has been read in proportion
    to its weight. The last block of a stage of known length is cut short, so that the stage has exactly its seats.
    """

    def __init__(self, stage: MixedStage, number: int, first: int, before: Sequence[int], seed: int):
        self.stage, self.first, self.before = stage, first, list(before)
        self._seats = Apportionment(stage.weights)
        self._seed = derived_seed(seed, _STAGE_SEEDS, number)

    def counts(self, num: int) -> list[int]:
        """Number of the stage's first `num` positions that each source has."""
        if self.stage.kind == "sequential" or num % BLOCK_SAMPLES == 0 or num == self.stage.num_samples:
            return self._seats.seats(num)
        number, rest = divmod(num, BLOCK_SAMPLES)
        counts = self._seats.seats(num - rest)
        in_block = np.bincount(self._block(number)[0][:rest], minlength=len(counts))
        return [count + more for count, more in zip(counts, in_block.tolist(), strict=True)]

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return source and draw of each of `positions`, counted from the beginning of the stage."""
        sources, draws = np.empty_like(positions), np.empty_like(positions)
        numbers, offsets = np.divmod(positions, BLOCK_SAMPLES)
        for number in np.unique(numbers):
            here = numbers == number
            block_sources, block_draws = self._block(int(number))
            sources[here], draws[here] = block_sources[offsets[here]], block_draws[offsets[here]]
        return sources, draws

    def _block(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return source and draw of each position of a block."""
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
    """The declared order of a run in stages over sources of `samples_per_source` samples.

    A position lies in a stage, which determines its source and the number d of the draw from that source. Draws are
    counted through all stages, so that no sample of a source is read twice before all were read once: draw d of a
    source of n samples lies in its epoch d // n, at index d mod n of the epoch, in the `SampleOrder` of that source.
    Only a stage of the other order ends an epoch early: it restarts the source, since neither order can continue where
    the other stopped. The last stage may be open.
    """

    def __init__(self, stages: Sequence[MixedStage], samples_per_source: Sequence[int], seed: int):
        assert stages and all(stage.num_samples is not None for stage in stages[:-1]), stages
        self.samples_per_source, self._seed = tuple(samples_per_source), seed
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
        self.firsts = [draws.first for draws in self._draws]
        """First position of each stage."""

    def at_many(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return epochs, each of a sample's source, and indices among all samples, at `positions` (one dimension)."""
        epochs, indices = np.empty_like(positions), np.empty_like(positions)
        numbers = np.searchsorted(self.firsts, positions, side="right") - 1
        for number in np.unique(numbers):
            in_stage = np.flatnonzero(numbers == number)
            stage = self._draws[number]
            sources, draws = stage.at(positions[in_stage] - stage.first)
            for source in np.unique(sources):
                here = sources == source
                seed = derived_seed(self._seed, _SOURCE_SEEDS, int(source))
                order = SampleOrder(self.samples_per_source[source], seed, stage.stage.kind)
                epochs[in_stage[here]], own = order.at_many(draws[here])
                indices[in_stage[here]] = self._first_samples[source] + own
        return epochs, indices

    def counts_by_stage(self, num: int) -> list[list[int]]:
        """Number of the run's first `num` positions that each stage draws from each source."""
        ends = [*self.firsts[1:], num]
        parts = [min(end, num) - draws.first for draws, end in zip(self._draws, ends, strict=True)]
        return [draws.counts(max(0, part)) for draws, part in zip(self._draws, parts, strict=True)]

    def counts(self, num: int) -> list[int]:
        """Number of the run's first `num` positions that are drawn from each source."""
        return [sum(column) for column in zip(*self.counts_by_stage(num), strict=True)]
