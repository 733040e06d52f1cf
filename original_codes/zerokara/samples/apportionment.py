"""The source of each position of a mixture, chosen so that every prefix of it has the proportions of the weights.

The positions 0, 1, 2, … are seats that the sources are given one after another by the method of Webster and
Sainte-Laguë: the seats of source s have the keys (2n + 1) / w_s for n = 0, 1, 2, …, and the seats of all sources are
given in ascending order of key, then of source. So of the first p seats source s has about w_s·p / Σw, rounded to a
whole number, and exactly that where these are whole numbers already; it never loses a seat when p grows; and its seats
lie evenly between those of the others. Source: M. Balinski, H. P. Young: Fair Representation, 1982.

All in whole numbers: weights are scaled to whole ones, and a key is multiplied by their least common multiple.

Example, weights 3 and 1: the keys are 1/3, 1, 5/3, 7/3, … and 1, 3, 5, …; the seats go to 0 0 1 0 0 0 1 0 0 0 1 0 …
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the same proportion, as small as they can be; 0.1 is taken as the tenth that was written."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole) or 1
    return tuple(weight // divisor for weight in whole)


class Apportionment:
    """The seats of a mixture."""

    def __init__(self, weights: Sequence[int]):
        assert min(weights) >= 0 and sum(weights) > 0, weights
        self.weights = tuple(weights)
        positive = [weight for weight in weights if weight]
        multiple = math.lcm(*positive)
        self._steps = [multiple // weight if weight else 0 for weight in weights]
        self._half_steps_off = len(positive)

    def seats(self, num: int) -> list[int]:
        """How many of the first `num` seats each source has; costs as much for the first as for the trillionth.

        Each source is given at once what it has for certain: with 1/λ the key of the last seat, over 2, it has
        round(w/λ) seats, these sum to `num`, and rounding adds at most 1/2 for each of the k sources, so that
        1/λ ≥ (num − k/2) / Σw. Fewer than k seats remain, and go to the lowest keys.
        """
        total, off = sum(self.weights), self._half_steps_off
        counts = [max(0, (weight * (2 * num - off) + total) // (2 * total)) for weight in self.weights]
        waiting = self._waiting(counts)
        for _ in range(num - sum(counts)):
            self._give(waiting, counts)
        return counts

    def sequence(self, first: int, num: int) -> list[int]:
        """The source of each of the `num` seats from seat `first` on."""
        counts = self.seats(first)
        waiting = self._waiting(counts)
        return [self._give(waiting, counts) for _ in range(num)]

    def _waiting(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """The key of each source's next seat, as a heap."""
        keys = [(self._key(source, count), source) for source, count in enumerate(counts) if self.weights[source]]
        heapq.heapify(keys)
        return keys

    def _give(self, waiting: list[tuple[int, int]], counts: list[int]) -> int:
        _, source = waiting[0]
        counts[source] += 1
        heapq.heapreplace(waiting, (self._key(source, counts[source]), source))
        return source

    def _key(self, source: int, count: int) -> int:
        return (2 * count + 1) * self._steps[source]
