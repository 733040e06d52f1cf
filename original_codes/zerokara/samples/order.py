"""The order in which a run reads its samples: position of the run → (epoch, index of the sample in the epoch).

Position i lies in epoch i // n. In `sequential` order its index is i mod n. In `shuffle` order it is P(i mod n), where
P is a permutation of [0, n) fixed by (seed, epoch) and *computed* at the requested point, in O(1) memory: a Feistel
network over the smallest even number of bits that holds n, walked along its cycle until the value is below n
(J. Black, P. Rogaway: Ciphers with Arbitrary Finite Domains, 2002). A Feistel network is a permutation whatever its
round function is, since each round can be undone; a permutation of a larger set, walked along its cycles, is one of
[0, n). So every process computes the same order, epochs differ, and a longer run keeps the prefix of a shorter one.

The round function and the keys are SplitMix64's (G. Steele, D. Lea, C. Flood: Fast Splittable Pseudorandom Number
Generators, 2014): with mix() its finaliser and G = 2^64/golden ratio, all modulo 2^64,

    state   = mix(mix(seed + G) + epoch)
    key_r   = mix(state + (r + 1)·G)                    for the rounds r = 0 … 7
    round_r : (left, right) → (right, left XOR the top `half` bits of mix(right XOR key_r))
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zerokara.config.data import OrderKind

NUM_ROUNDS = 8
"""4 make a strong permutation of a large set (Luby and Rackoff, 1988); sets of a few bits need more."""
MIN_HALF_BITS = 3
"""Halves below 3 bits have so few round functions that some permutations of 3 or 4 samples never come."""

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, an odd number whose multiples spread evenly over 64 bits."""
_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix(value: int) -> int:
    """SplitMix64's finaliser: a one-to-one scrambling of 64 bits."""
    value &= _MASK
    value = (value ^ (value >> 30)) * _MULTIPLIERS[0] & _MASK
    value = (value ^ (value >> 27)) * _MULTIPLIERS[1] & _MASK
    return value ^ (value >> 31)


def mix_many(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix` of each (numpy's uint64 arrays wrap round by themselves)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    return values ^ (values >> np.uint64(31))


class KeyedPermutation:
    """A pseudo-random permutation of [0, n), fixed by (seed, epoch) and computed point by point."""

    def __init__(self, n: int, seed: int, epoch: int = 0):
        assert n >= 1, f"a permutation of {n} numbers"
        self.n = n
        self._half_bits = max(MIN_HALF_BITS, -(-(n - 1).bit_length() // 2))
        state = mix(mix(seed + GOLDEN) + epoch)
        self._keys = np.array([mix(state + (r + 1) * GOLDEN) for r in range(NUM_ROUNDS)], dtype=np.uint64)

    def at(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The images of `indices` (in [0, n), one dimension)."""
        values = self._once(indices.astype(np.uint64))
        outside = np.flatnonzero(values >= self.n)
        while len(outside):  # a value meets one below n after 4 steps on average at worst (n ≥ 16)
            values[outside] = self._once(values[outside])
            outside = outside[values[outside] >= self.n]
        return values.astype(np.int64)

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The Feistel network: a permutation of [0, 4^half_bits)."""
        half, top = np.uint64(self._half_bits), np.uint64(64 - self._half_bits)
        left, right = values >> half, values & np.uint64((1 << self._half_bits) - 1)
        for key in self._keys:
            left, right = right, left ^ (mix_many(right ^ key) >> top)
        return (left << half) | right


class SampleOrder:
    """The declared order of a run over `num_samples` samples an epoch, as a pure function of the position."""

    def __init__(self, num_samples: int, seed: int, kind: OrderKind = "shuffle"):
        assert num_samples >= 1, f"an order of {num_samples} samples"
        assert kind in ("shuffle", "sequential"), kind
        self.num_samples, self.seed, self.kind = num_samples, seed, kind

    def at_many(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Epochs and indices of the samples at `positions` (one dimension, in any order, over any epochs)."""
        epochs, indices = np.divmod(positions, self.num_samples)
        if self.kind == "shuffle":
            for epoch in np.unique(epochs):
                here = epochs == epoch
                indices[here] = KeyedPermutation(self.num_samples, self.seed, int(epoch)).at(indices[here])
        return epochs, indices
