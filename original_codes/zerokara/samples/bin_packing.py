"""Examples of many lengths → rows of one length, so that hardly any of what is computed is padding.

A row has two capacities, for the encoder input and for the decoder target; a decoder's examples have no targets. Each
row is filled by itself: with the largest example that is left, then with the longest ones that keep the ratio of the
rooms on both sides, as long as there are such. For a decoder this is first-fit decreasing. The seed draws the order of
examples of equal lengths. Source: Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.

Example, a capacity of 8, lengths 3 5 4 2 2: rows [5 3] and [4 2 2].
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows = list[NDArray[np.int64]]
"""Numbers of the examples of each row; within a row they ascend."""

VERSION = 3
"""Increases when the same lengths give other rows: a run resumes only with the rows that it began with."""
LENGTH_MULTIPLE = 8
"""Fused attention kernels want the rows of a mask aligned to 8 numbers."""
_BALANCED = 0.8
"""Share of its part of the target room that an example at least uses, or a row would be left with room in one side."""
_TRIED_STEP = 4
"""Encoder inputs that are tried for a balanced example: each is a quarter shorter than the one before. All of them
took six times the time for rows as full."""
_TRIED_EXAMPLES = 4096
"""Examples, drawn at random, that are packed with each target length that is tried."""
_TRIED_SHARES = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6, 2.0)
"""Target lengths that are tried, over the one at which both sides would be full together."""


def pack(
    inputs: ArrayLike, input_capacity: int, targets: ArrayLike = 0, target_capacity: int = 0, seed: int = 0
) -> Rows:
    """Pack examples by their lengths of encoder input and decoder target, each 1 to its capacity, into rows.

    A decoder's examples have the one length of `inputs`.
    """
    sizes = np.array(np.broadcast_arrays(inputs, targets), dtype=np.int64)
    drawn = np.random.default_rng(seed).permutation(sizes.shape[1])
    shares = sizes[0] / input_capacity + sizes[1] / max(target_capacity, 1)
    order = drawn[np.argsort(-shares[drawn], kind="stable")]
    lengths: list[tuple[int, int]] = list(map(tuple, sizes.T[order].tolist()))
    unpacked, rows = _Unpacked(order[::-1].tolist(), lengths[::-1]), Rows()
    for first in lengths:
        row, chosen = list[int](), first if unpacked.examples[first] else None
        room, target_room = input_capacity, target_capacity
        while chosen:
            row.append(unpacked.take(chosen))
            room, target_room = room - chosen[0], target_room - chosen[1]
            chosen = unpacked.best(room, target_room)
        rows += [np.array(sorted(row))] if row else []
    return rows


def target_length(input_lengths: ArrayLike, target_lengths: ArrayLike, input_capacity: int) -> int:
    """Choose the target length of packed rows, a multiple of 8, that wastes the fewest positions of both sides."""
    inputs, targets = (np.asarray(lengths, dtype=np.int64) for lengths in (input_lengths, target_lengths))
    full = input_capacity * targets.sum() / inputs.sum()
    longest = int(targets.max())
    tried = sorted({rounded_up(max(longest, int(np.ceil(full * share)))) for share in _TRIED_SHARES})
    drawn = np.random.default_rng(0).permutation(len(inputs))[:_TRIED_EXAMPLES]
    inputs, targets = inputs[drawn], targets[drawn]
    rows = [len(pack(inputs, input_capacity, targets, length)) for length in tried]
    return tried[int(np.argmin([num * (input_capacity + length) for num, length in zip(rows, tried, strict=True)]))]


class _Unpacked:
    """The examples that have no row yet, by their two lengths; of equal lengths the last is taken first."""

    def __init__(self, order: list[int], lengths: list[tuple[int, int]]):
        self.examples: dict[tuple[int, int], list[int]] = {}
        self._inputs = 0
        """Bit s is set where there is an example with an encoder input of s."""
        self._targets: dict[int, int] = {}
        """By such an input, the bits of its targets."""
        for example, (size, target) in zip(order, lengths, strict=True):
            self.examples.setdefault((size, target), []).append(example)
            self._inputs |= 1 << size
            self._targets[size] = self._targets.get(size, 0) | 1 << target

    def take(self, lengths: tuple[int, int]) -> int:
        """Remove an example of these lengths and return its number."""
        size, target = lengths
        example = self.examples[lengths].pop()
        if not self.examples[lengths]:
            self._targets[size] ^= 1 << target
            if not self._targets[size]:
                self._inputs ^= 1 << size
        return example

    def best(self, room: int, target_room: int) -> tuple[int, int] | None:
        """Lengths of the longest input that fits and keeps the ratio of the rooms; else of the longest that fits."""
        fitting = self._inputs & ((2 << room) - 1)
        all_targets = (2 << target_room) - 1
        longest: tuple[int, int] | None = None
        while fitting:
            size = fitting.bit_length() - 1
            fitting ^= 1 << size
            if targets := self._targets[size] & all_targets:
                share = size * target_room // room
                balanced = (targets & ((2 << share) - 1)).bit_length() - 1
                if balanced < 0:  # more than its share of the target, as all shorter ones may have
                    return longest or (size, (targets & -targets).bit_length() - 1)
                if balanced >= share * _BALANCED:
                    return size, balanced
                longest = longest or (size, balanced)
                fitting &= (1 << size - size // _TRIED_STEP) - 1
        return longest


def rounded_up(length: int) -> int:
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
