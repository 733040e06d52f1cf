"""Metrics against the libraries that define them and values by hand; their intervals, subsets and differences."""

from __future__ import annotations

import random

import numpy as np
import pytest
from sacrebleu.metrics import CHRF
from sklearn.metrics import accuracy_score, f1_score

from zerokara.evaluation import scoring as measures
from zerokara.evaluation import scoring as metrics
from zerokara.evaluation.scoring import Measure

LABELS = ("good", "bad", "so so")


def labelled(num: int = 200, right: float = 0.6, seed: int = 3) -> tuple[list[str], list[str]]:
    """Outputs and references; some outputs are no label."""
    chance = random.Random(seed)
    references = chance.choices(LABELS, (5, 3, 1), k=num)
    outputs = [
        answer if chance.random() < right else chance.choice((*LABELS, "excellent", "")) for answer in references
    ]
    return outputs, references


def test_accuracy_and_macro_f1_are_scikit_learns() -> None:
    outputs, references = labelled()
    assert metrics.accuracy(outputs, references).value == pytest.approx(accuracy_score(references, outputs))
    expected = f1_score(references, outputs, labels=LABELS, average="macro", zero_division=0)
    assert metrics.macro_f1(outputs, references).value == pytest.approx(expected)
    assert metrics.accuracy(outputs, references).value != pytest.approx(expected), "one would pass for the other"


def test_an_output_that_is_no_label_is_wrong_and_reported() -> None:
    outputs, references = ["good", "excellent", " bad\n", "", "excellent"], ["good", "good", "bad", "bad", "bad"]
    assert metrics.accuracy(outputs, references).value == 2 / 5
    assert metrics.macro_f1(outputs, references).value == pytest.approx((2 / 3 + 2 / 4) / 2)
    found = metrics.unmatched(outputs, LABELS)
    assert found == ["excellent", "", "excellent"]


def test_a_label_that_a_resample_lacks_is_not_measured_in_it() -> None:
    both = metrics.macro_f1(["a", "a", "b"], ["a", "a", "b"])
    assert both.subset([0, 1]).value == 1.0
    assert np.isnan(both.subset([]).value)


def test_exact_match_sees_everything_but_white_space_around_and_the_way_of_composing() -> None:
    outputs = [" a b\n", "a  b", "A b", "s\u0326i", "și"]
    references = ["a b", "a b", "a b", "și", "şi"]
    assert metrics.exact_match(outputs, references).statistics[:, 0].tolist() == [1, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("output", "reference", "right", "total"),
    [
        ("fata sta", "fața stă", 0, 2),
        ("fața, sta!", "fața stă", 1, 2),  # punctuation is no word
        ("b a", "a b", 0, 2),  # as many words: by position
        ("x a b c", "a b c", 3, 3),  # else aligned
        ("a c", "a b c", 2, 3),
        ("", "a b", 0, 2),
        ("de 12 ori", "de 12 ori", 3, 3),
        ("हिन्दी में", "हिन्दी मे", 1, 2),  # vowel signs belong to words
    ],
)
def test_words_stand_at_their_place(output: str, reference: str, right: int, total: int) -> None:
    assert metrics.word_accuracy([output], [reference]).statistics.tolist() == [[right, total]]


def test_word_accuracy_is_over_words_and_not_over_examples() -> None:
    found = metrics.word_accuracy(["a", "b b b x"], ["a", "b b b b"])
    assert found.value == 4 / 5


def test_chrf_is_sacrebleus() -> None:
    chance = random.Random(1)
    words = ["alfa", "beta", "gama", "delta", "și"]
    references = [" ".join(chance.choices(words, k=9)) for _ in range(20)]
    outputs = [" ".join(word[:-1] if chance.random() < 0.3 else word for word in text.split()) for text in references]
    found = metrics.chrf(outputs, references)
    assert found.value == pytest.approx(CHRF().corpus_score(outputs, [references]).score / 100)
    assert found.subset([3]).value == pytest.approx(CHRF().sentence_score(outputs[3], [references[3]]).score / 100)
    assert 0.5 < found.value < 1.0


@pytest.mark.parametrize("name", sorted(metrics.METRICS))
def test_every_metric_is_one_where_all_is_right_and_its_interval_holds_it(name: str) -> None:
    outputs, references = labelled()
    metric = metrics.METRICS[name]
    assert metric(references, references).value == pytest.approx(1.0)
    found = metric(outputs, references)
    interval = found.interval()
    assert found.name == name and found.higher_is_better
    assert interval is not None and interval.low < found.value < interval.high < interval.low + 0.2
    assert metric(outputs[:1], references[:1]).interval() is None


def resampled_values(measure: Measure) -> list[float]:
    """The values of resamples whose examples are drawn one by one."""
    rows = np.random.default_rng(1).integers(0, len(measure.statistics), (2000, len(measure.statistics)))
    return [measure.subset(row).value for row in rows]


@pytest.mark.parametrize("name", ["macro_f1", "word_accuracy"])
def test_drawing_like_examples_together_gives_the_interval_of_drawing_each(name: str) -> None:
    measure = metrics.METRICS[name](*labelled())
    found, expected = measure.interval(), np.quantile(resampled_values(measure), [0.025, 0.975])
    assert found is not None
    assert [found.low, found.high] == pytest.approx(expected.tolist(), abs=0.01)


def test_bootstrap_of_a_proportion_agrees_with_wilsons_interval() -> None:
    found = metrics.accuracy(*labelled())
    wilson, resampled = found.interval(), np.quantile(resampled_values(found), [0.025, 0.975])
    assert wilson is not None
    assert [wilson.low, wilson.high] == pytest.approx(resampled.tolist(), abs=0.01)


def test_nothing_right_has_an_interval_above_zero() -> None:
    interval = metrics.accuracy(["x"] * 50, ["a"] * 50).interval()
    assert interval is not None and interval.low == 0.0 and 0.05 < interval.high < 0.1


def test_the_paired_difference_is_narrower_than_that_of_independent_samples() -> None:
    outputs, references = labelled(400)
    better = [
        answer if index % 10 == 0 else output
        for index, (output, answer) in enumerate(zip(outputs, references, strict=True))
    ]
    first, second = (metrics.accuracy(each, references) for each in (better, outputs))
    paired = first.difference(second)
    assert paired is not None and paired.excludes_zero
    assert paired.low < first.value - second.value < paired.high
    alone = [interval for measure in (first, second) if (interval := measure.interval())]
    assert paired.high - paired.low < 0.7 * np.hypot(*(each.high - each.low for each in alone))
    same = second.difference(second)
    assert same is not None and (same.low, same.high) == (0.0, 0.0)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """100 samples of words, of which 30 % are right: 95 % of the intervals should hold 0.3."""
    chance = np.random.default_rng(4)
    covered = 0
    for _ in range(100):
        totals = chance.integers(1, 20, size=120)
        found = measures.share("x", chance.binomial(totals, 0.3).astype(float), totals.astype(float)).interval()
        assert found is not None
        covered += found.low <= 0.3 <= found.high
    assert 88 <= covered <= 100


def test_resamples_without_anything_to_measure_are_left_out() -> None:
    found = Measure("x", np.array([[1.0, 1.0], [0.0, 0.0]]), measures.ratio)
    assert found.interval() is not None and found.interval().low == 1.0  # type: ignore[union-attr]
