"""The seats of a mixture against the method written out plainly, with fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest

from zerokara.samples.apportionment import Apportionment, whole_weights

WEIGHTS = [(1,), (3, 1), (1, 1, 1), (5, 0, 2), (1, 1000), (7, 5, 3, 1), (10**9 + 7, 123_456_789, 2), (0, 0, 4)]


def plainly(weights: tuple[int, ...], num: int) -> list[int]:
    """Give each seat to the source with the lowest (2n + 1) / w, n being what it has."""
    counts, seats = [0] * len(weights), []
    for _ in range(num):
        keys = [(Fraction(2 * n + 1, w), s) for s, (n, w) in enumerate(zip(counts, weights, strict=True)) if w]
        seats.append(min(keys)[1])
        counts[seats[-1]] += 1
    return seats


def test_the_example_of_the_docstring() -> None:
    assert Apportionment((3, 1)).sequence(0, 12) == [0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_seats_are_those_of_the_method_wherever_one_begins(weights: tuple[int, ...]) -> None:
    expected = plainly(weights, 400)
    seats = Apportionment(weights)
    for num in range(401):
        counts = seats.seats(num)
        assert counts == [expected[:num].count(source) for source in range(len(weights))]
        assert all(abs(n - w * num / sum(weights)) <= len(weights) / 2 for n, w in zip(counts, weights, strict=True))
    for first in (0, 1, 17, 399):
        assert seats.sequence(first, 400 - first) == expected[first:]


def test_whole_shares_are_given_exactly() -> None:
    assert Apportionment((123, 0, 77, 1)).seats(201) == [123, 0, 77, 1]
    assert Apportionment((3, 1)).seats(4 * 10**15) == [3 * 10**15, 10**15]


def test_the_trillionth_seat_costs_nothing() -> None:
    counts = Apportionment((10**9 + 7, 123_456_789, 2)).seats(10**12)
    assert sum(counts) == 10**12 and all(isinstance(count, int) for count in counts)


def test_weights_are_what_was_written() -> None:
    assert whole_weights([0.1, 0.2, 0]) == (1, 2, 0)  # and not 0.1's nearest binary fraction
    assert whole_weights([3.0, 1.5, 1e-3]) == (3000, 1500, 1)
    assert whole_weights([8e9, 4e9]) == (2, 1)
