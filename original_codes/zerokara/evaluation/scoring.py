"""Metrics of a task, each with what every example adds to it, and 95 % confidence intervals.

Every metric is a function of sums over the examples: of right answers, of words, of matching n-grams. A `Measure` keeps
one row of statistics an example: the bootstrap draws rows, adds them up and computes the metric anew, and a subset of
the examples is a subset of the rows. What is drawn is the unit that was sampled: a document, not its tokens, which
resemble each other and would make the interval too narrow.

All values are shares between 0 and 1, chrF too (sacrebleu's divided by 100). An output and a reference are compared
without white space around them and in Unicode's composed form (NFC). Case, punctuation and inner white space count.

Source: B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13 (percentile interval).

Shapes: N examples, K statistics, R resamples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np
import regex
from numpy.typing import NDArray

from zerokara.corpus.token_hashes import UNSPACED, composed

Statistics = NDArray[np.float64]
LEVEL = 0.95
NUM_RESAMPLES = 2000
"""Enough for the ends of a 95 % interval to move by less than a twentieth of its width from seed to seed."""
SMALL_SAMPLE = 30
"""Below this many units a percentile interval is too narrow: it holds the truth in 93 % of cases at 30, 90 % at 10."""
WORD = regex.compile(rf"[^\W{UNSPACED}]+|(?=\w)[{UNSPACED}]")
"""Letters, digits, underscores and combining marks (UTS 18), or one character of a script without spaces; `re` ends a
word at the vowel signs of Devanagari."""
words = WORD.findall


class Interval(NamedTuple):
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """True if a difference with this interval is distinguished from zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Measure:
    """A metric over some examples."""

    name: str
    statistics: Statistics
    """Statistics that each example adds to the sums, [N, K]."""
    of_sums: Callable[[Statistics], Statistics]
    """Sums [..., K] → the metric [...]; NaN where there is nothing to measure."""

    @property
    def value(self) -> float:
        """The metric over all examples; NaN if there are none."""
        return float(self.of_sums(self.statistics.sum(axis=0)))

    def subset(self, indices: Sequence[int]) -> "Measure":
        """The same metric over some of the examples."""
        return replace(self, statistics=self.statistics[np.asarray(indices, dtype=np.int64)])

    def interval(self, seed: int = 0) -> Interval | None:
        """95 % interval of the value; None for fewer than two examples, or where there is nothing to measure.

        A proportion of the examples has Wilson's interval, which is right at 0 and 1 too, where resampling shows no
        spread; any other metric has that of the bootstrap.
        """
        if len(self.statistics) < 2:
            return None
        hits, totals = self.statistics[:, 0], self.statistics[:, 1:]
        if self.of_sums is ratio and (totals == 1).all() and np.isin(hits, (0, 1)).all():
            from scipy.stats import binomtest  # a second to import

            return Interval(*map(float, binomtest(int(hits.sum()), len(hits)).proportion_ci(LEVEL, "wilson")))
        return _percentiles(self.of_sums(_resampled_sums(self.statistics, seed)))

    def difference(self, other: "Measure", seed: int = 0) -> Interval | None:
        """95 % interval of this value minus the other's, over the same examples; None for fewer than two.

        Both are resampled together, so that what makes an example hard for both cancels.
        """
        assert self.name == other.name and len(self.statistics) == len(other.statistics), "not the same examples"
        if len(self.statistics) < 2:
            return None
        sums = _resampled_sums(np.concatenate((self.statistics, other.statistics), axis=1), seed)
        ours, theirs = np.split(sums, [self.statistics.shape[1]], axis=1)
        return _percentiles(self.of_sums(ours) - other.of_sums(theirs))


def _resampled_sums(statistics: Statistics, seed: int) -> Statistics:
    """Sums of the statistics over examples drawn with replacement, [R, K]."""
    random, num = np.random.default_rng(seed), len(statistics)
    # scipy.stats.bootstrap would hold R·N·K numbers, and gives NaN where one resample has nothing to measure.
    drawn = (np.bincount(random.integers(0, num, num, np.int32), minlength=num) for _ in range(NUM_RESAMPLES))
    return np.array([counts @ statistics for counts in drawn])


def _percentiles(values: Statistics) -> Interval | None:
    """The middle 95 % of those resampled values in which there was something to measure."""
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def share(name: str, hits: Sequence[float] | Statistics, totals: Sequence[float] | Statistics) -> Measure:
    """The metric that is a sum of `hits` divided by a sum of `totals`, one of each for every example."""
    return Measure(name, np.array([hits, totals], np.float64).T.reshape(-1, 2), ratio)


def ratio(sums: Statistics) -> Statistics:
    return _divided(sums[..., 0], sums[..., 1])


def _divided(numerator: Statistics, denominator: NDArray[np.float64] | NDArray[np.int64]) -> Statistics:
    """The quotient, NaN where it is 0 / 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(denominator > 0, numerator / denominator, np.nan)


def accuracy(outputs: Sequence[str], references: Sequence[str]) -> Measure:
    """Share of the outputs that are the label's text; an output that is no label's text is wrong."""
    return replace(exact_match(outputs, references), name="accuracy")


def exact_match(outputs: Sequence[str], references: Sequence[str]) -> Measure:
    """Share of the outputs that are the reference."""
    hits = [output == reference for output, reference in _cleaned(outputs, references)]
    return share("exact_match", hits, [1] * len(hits))


def macro_f1(outputs: Sequence[str], references: Sequence[str]) -> Measure:
    """Mean over the labels of F1 = 2 · right / (outputs + references of that label).

    The labels are those that occur among the references (of a resample: among its references). An output that is no
    label's text is missing from its own label, and belongs to none.
    """
    pairs = _cleaned(outputs, references)
    labels = {label: place for place, label in enumerate(sorted({answer for _, answer in pairs}))}
    statistics = np.zeros((len(pairs), 3, len(labels)))
    for row, (output, answer) in enumerate(pairs):
        statistics[row, 1, labels[answer]] = 1
        if output in labels:
            statistics[row, 2, labels[output]] = 1
            statistics[row, 0, labels[output]] = output == answer

    def of_sums(sums: Statistics) -> Statistics:
        right, references, outputs = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, 0)
        occurs = references > 0
        f1 = np.where(occurs, _divided(2 * right, references + outputs), 0.0)
        return _divided(f1.sum(axis=-1), occurs.sum(axis=-1))

    return Measure("macro_f1", statistics.reshape(len(pairs), -1), of_sums)


def word_accuracy(outputs: Sequence[str], references: Sequence[str]) -> Measure:
    """Share of the words of the references that stand at their place in the output.

    Words are runs of letters, digits and marks (`WORD`), so punctuation does not count. Where output and reference
    have equally many, the n-th belongs to the n-th; else they are aligned by difflib's matching blocks. Words that an
    output has beyond the reference's are not counted.
    """
    hits, totals = [], []
    for output, reference in _cleaned(outputs, references):
        found, expected = words(output), words(reference)
        if len(found) == len(expected):
            hits.append(sum(map(str.__eq__, found, expected)))
        else:
            matcher = SequenceMatcher(None, found, expected, autojunk=False)
            hits.append(sum(block.size for block in matcher.get_matching_blocks()))
        totals.append(len(expected))
    return share("word_accuracy", hits, totals)


def chrf(outputs: Sequence[str], references: Sequence[str]) -> Measure:
    """chrF2 of the corpus as sacrebleu computes it (character n-grams up to 6, no words, beta 2), divided by 100."""
    from sacrebleu.metrics import CHRF

    metric, pairs = CHRF(), _cleaned(outputs, references)
    # sacrebleu's own bootstrap is made of these two (metrics/base.py, corpus_score), but gives no paired differences.
    rows = metric._extract_corpus_statistics([pair[0] for pair in pairs], [[pair[1] for pair in pairs]])

    def of_sums(sums: Statistics) -> Statistics:
        return np.apply_along_axis(lambda row: metric._compute_f_score(row.tolist()) / 100, -1, sums)

    return Measure("chrf", np.array(rows, np.float64).reshape(len(pairs), 3 * metric.order), of_sums)


METRICS: dict[str, Callable[[Sequence[str], Sequence[str]], Measure]] = {
    each.__name__: each for each in (accuracy, macro_f1, exact_match, word_accuracy, chrf)
}
"""Metrics of outputs and references, by their names in the settings; a further one is an entry here."""


def unmatched(outputs: Sequence[str], labels: Sequence[str]) -> list[str]:
    """The outputs that match none of `labels`, which accuracy and macro-F1 count as wrong."""
    known = set(map(clean, labels))
    return [output for output in outputs if clean(output) not in known]


def clean(text: str) -> str:
    """A text as it is compared: composed (NFC), without white space around it."""
    return composed(text).strip()


def _cleaned(outputs: Sequence[str], references: Sequence[str]) -> list[tuple[str, str]]:
    return [(clean(output), clean(reference)) for output, reference in zip(outputs, references, strict=True)]
