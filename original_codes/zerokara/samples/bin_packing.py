"""Examples of many lengths → rows of one length, so that hardly any of what is computed is padding.

For a decoder it is best-fit decreasing: an example, the longest first, goes into the row that it leaves the least room
in, or into a new one. For an encoder-decoder a row has two capacities, for the encoder input and for the decoder
target, and is filled by itself: with the longest example, then with the longest ones that keep the ratio of the rooms
on both sides, as long as there are such. The seed draws the order of examples of equal lengths. Source: Krell et al.,
Efficient Sequence Packing without Cross-contamination, 2021.

Example, a capacity of 8, lengths 3 5 4 2 2: rows [5 3] and [4 2 2].
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Lengths = NDArray[np.int64]
Rows = list[NDArray[np.int64]]
"""Numbers of the examples of each row; within a row they ascend."""

VERSION = 2
"""Increases when the same lengths give other rows: a run resumes only with the rows that it began with."""
LENGTH_MULTIPLE = 8
"""Fused attention kernels want the rows of a mask aligned to 8 numbers."""
_BALANCED = 0.8
"""Share of its part of the target room that an example at least uses, or a row would be left with room in one side."""
_TRIED_ALL, _TRIED_STEP = 4, 8
"""Number of the longest encoder inputs that are tried for a balanced example, and then one each time an eighth shorter.
Of inputs that are long beside their targets all would be 130, which took five times the time for rows as full."""
_TRIED_EXAMPLES = 4096
"""Examples, drawn at random, that are packed with each target length that is tried."""
_TRIED_SHARES = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6, 2.0)
"""Target lengths that are tried, over the one at which both sides would be full together."""


def pack(lengths: ArrayLike, capacity: int, seed: int = 0) -> Rows:
    """Pack examples of these lengths, 1 to `capacity` each, into rows of `capacity` positions."""
    sizes = np.asarray(lengths, dtype=np.int64)
    row_of = np.empty(len(sizes), dtype=np.int64)
    order = _longest_first(sizes, seed)
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room that they have left
    rooms, num_rows = 0, 0  # bit r of `rooms` is set where there is a row with room for r
    chosen = []
    for size in sizes[order].tolist():
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[room].pop()
            if not rows_with[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, num_rows
            num_rows += 1
        chosen.append(row)
        if room > size:
            rows_with[room - size].append(row)
            rooms |= 1 << (room - size)
    row_of[order] = chosen
    return _rows(row_of, num_rows)


def pack_pairs(
    input_lengths: ArrayLike, target_lengths: ArrayLike, input_capacity: int, target_capacity: int, seed: int = 0
) -> Rows:
    """Pack examples of two lengths, of encoder input and decoder target, each 1 to its capacity."""
    inputs, targets = (np.asarray(lengths, dtype=np.int64) for lengths in (input_lengths, target_lengths))
    order = _longest_first(inputs / input_capacity + targets / target_capacity, seed)
    unpacked = _Unpacked(inputs, targets, order[::-1])
    row_of, num_rows = np.empty(len(inputs), dtype=np.int64), 0
    for first in zip(inputs[order].tolist(), targets[order].tolist(), strict=True):
        lengths: tuple[int, int] | None = first
        room, target_room = input_capacity, target_capacity
        while lengths is not None and (example := unpacked.take(*lengths)) is not None:
            row_of[example] = num_rows
            room, target_room = room - lengths[0], target_room - lengths[1]
            lengths = unpacked.best(room, target_room)
        num_rows += room < input_capacity
    return _rows(row_of, num_rows)


def target_length(input_lengths: ArrayLike, target_lengths: ArrayLike, input_capacity: int) -> int:
    """Choose the target length of packed rows, a multiple of 8, that wastes the fewest positions of both sides."""
    inputs, targets = (np.asarray(lengths, dtype=np.int64) for lengths in (input_lengths, target_lengths))
    full = input_capacity * targets.sum() / inputs.sum()
    longest = int(targets.max())
    tried = sorted({rounded_up(max(longest, int(np.ceil(full * share)))) for share in _TRIED_SHARES})
    if len(tried) == 1:
        return tried[0]
    drawn = np.random.default_rng(0).permutation(len(inputs))[:_TRIED_EXAMPLES]
    inputs, targets = inputs[drawn], targets[drawn]
    rows = [len(pack_pairs(inputs, targets, input_capacity, length)) for length in tried]
    return tried[int(np.argmin([num * (input_capacity + length) for num, length in zip(rows, tried, strict=True)]))]


class _Unpacked:
    """The examples that have no row yet, by their two lengths; of equal lengths the last of `order` is taken first."""

    def __init__(self, inputs: Lengths, targets: Lengths, order: Lengths):
        self._examples: dict[tuple[int, int], list[int]] = {}
        self._inputs = 0
        """Bit s is set where there is an example with an encoder input of s."""
        self._targets: dict[int, int] = {}
        """By such an input, the bits of its targets."""
        for example, size, target in zip(order.tolist(), inputs[order].tolist(), targets[order].tolist(), strict=True):
            self._examples.setdefault((size, target), []).append(example)
            self._inputs |= 1 << size
            self._targets[size] = self._targets.get(size, 0) | 1 << target

    def take(self, size: int, target: int) -> int | None:
        """Remove an example of these lengths and return its number; None if there is none."""
        examples = self._examples[size, target]
        if not examples:
            return None
        example = examples.pop()
        if not examples:
            self._targets[size] ^= 1 << target
            if not self._targets[size]:
                self._inputs ^= 1 << size
        return example

    def best(self, room: int, target_room: int) -> tuple[int, int] | None:
        """Lengths of the longest input that fits and keeps the ratio of the rooms; else of the longest that fits."""
        fitting = self._inputs & ((2 << room) - 1)
        all_targets = (2 << target_room) - 1
        longest: tuple[int, int] | None = None
        tried = 0
        while fitting:
            size = fitting.bit_length() - 1
            if targets := self._targets[size] & all_targets:
                share = size * target_room // room
                balanced = (targets & ((2 << share) - 1)).bit_length() - 1
                if balanced < 0:  # more than its share of the target, as all shorter ones may have
                    return longest or (size, (targets & -targets).bit_length() - 1)
                if balanced >= share * _BALANCED:
                    return size, balanced
                longest = longest or (size, balanced)
                tried += 1
            fitting &= (1 << size - (0 if tried < _TRIED_ALL else size // _TRIED_STEP)) - 1
        return longest


def _longest_first(sizes: Lengths | NDArray[np.float64], seed: int) -> Lengths:
    drawn = np.random.default_rng(seed).permutation(len(sizes))
    return drawn[np.argsort(-sizes[drawn], kind="stable")]


def _rows(row_of: Lengths, num_rows: int) -> Rows:
    """Return the rows in which example i lies in row `row_of[i]`."""
    ends = np.cumsum(np.bincount(row_of, minlength=num_rows))
    return np.split(np.argsort(row_of, kind="stable"), ends)[:num_rows]


def rounded_up(length: int) -> int:
    """Round up to a multiple of `LENGTH_MULTIPLE`."""
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
