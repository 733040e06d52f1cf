"""A metric over examples that keeps what each of them adds, so that it can be resampled and restricted.

Every metric of a task is a function of sums over the examples: of right answers, of words, of matching n-grams. A
`Measure` keeps one row of statistics for each example; the bootstrap draws rows, adds them up, and computes the metric
anew, and a subset of the examples (those that do not overlap the training data) is a subset of the rows.

Shapes: N examples, K statistics, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from zerokara.evaluation import intervals
from zerokara.evaluation.intervals import NUM_RESAMPLES, Interval

Statistics = NDArray[np.float64]
Numbers = Sequence[float] | Statistics
_CELLS = 4_000_000
"""Counts drawn at once, 32 MB."""


@dataclass(frozen=True)
class Measure:
    """A metric over some examples."""

    name: str
    statistics: Statistics
    """What each example adds to the sums, [N, K]."""
    of_sums: Callable[[Statistics], Statistics]
    """Sums [..., K] → the metric [...]; NaN where there is nothing to measure."""
    higher_is_better: bool = True

    @property
    def value(self) -> float:
        """The metric over all examples; NaN if there are none."""
        return float(self.of_sums(self.statistics.sum(axis=0)))

    def subset(self, indices: Sequence[int] | NDArray[np.int64]) -> Measure:
        """The same metric over some of the examples."""
        return replace(self, statistics=self.statistics[np.asarray(indices, dtype=np.int64)])

    def interval(self, seed: int = 0) -> Interval | None:
        """The 95 % interval of the value; None for fewer than two examples, or where there is nothing to measure.

        Of a proportion of the examples it is Wilson's, which is right at 0 and 1 too, where resampling shows no spread;
        of any other metric the bootstrap's over the examples.
        """
        if len(self.statistics) < 2:
            return None
        if self._is_proportion:
            return intervals.wilson(int(self.statistics[:, 0].sum()), len(self.statistics))
        sums = _resampled_sums(self.statistics, seed)
        return intervals.percentile_interval(_known(self.of_sums(sums)))

    def difference(self, other: Measure, seed: int = 0) -> Interval | None:
        """The 95 % interval of this value minus the other's, which is of the same examples; None for fewer than two.

        Both are resampled together, so that what makes an example hard for both cancels.
        """
        assert self.name == other.name and len(self.statistics) == len(other.statistics), "not the same examples"
        if len(self.statistics) < 2:
            return None
        sums = _resampled_sums(np.concatenate((self.statistics, other.statistics), axis=1), seed)
        ours, theirs = np.split(sums, [self.statistics.shape[1]], axis=1)
        return intervals.percentile_interval(_known(self.of_sums(ours) - other.of_sums(theirs)))

    @property
    def _is_proportion(self) -> bool:
        """Whether each example is a hit or none."""
        return self.of_sums is ratio and bool(
            (self.statistics[:, 1] == 1).all() and np.isin(self.statistics[:, 0], (0, 1)).all()
        )


def share(name: str, hits: Numbers, totals: Numbers, higher_is_better: bool = True) -> Measure:
    """The metric that is a sum of `hits` divided by a sum of `totals`, one of each for every example."""
    return Measure(name, np.array([hits, totals], np.float64).T.reshape(-1, 2), ratio, higher_is_better)


def ratio(sums: Statistics) -> Statistics:
    """The first sum divided by the second."""
    return divided(sums[..., 0], sums[..., 1])


def divided(numerator: Statistics, denominator: NDArray[np.float64] | NDArray[np.int64]) -> Statistics:
    """The quotient, NaN where it is 0 / 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(denominator > 0, numerator / denominator, np.nan)


def _resampled_sums(statistics: Statistics, seed: int) -> Statistics:
    """Sums of the statistics over examples drawn with replacement, [R, K].

    Examples with the same statistics are drawn together, by how many of them a resample holds: of the 50,000 answers to
    a question of yes or no only the number of right ones is drawn, a thousand times faster. Where most differ, drawing
    each is faster.
    """
    random, num = np.random.default_rng(seed), len(statistics)
    rows, counts = np.unique(statistics, axis=0, return_counts=True)
    are_distinct = len(rows) > num / 2
    if are_distinct:
        rows = statistics
    at_once = max(1, _CELLS // len(rows))
    parts = []
    for start in range(0, NUM_RESAMPLES, at_once):
        size = min(at_once, NUM_RESAMPLES - start)
        if are_distinct:
            drawn = [np.bincount(random.integers(0, num, num, np.int32), minlength=num) for _ in range(size)]
            parts.append(np.array(drawn, np.float64) @ rows)
        else:
            parts.append(random.multinomial(num, counts / num, size=size) @ rows)
    return np.concatenate(parts)


def _known(values: Statistics) -> Statistics:
    """The values of those resamples in which there was something to measure."""
    return values[~np.isnan(values)]
