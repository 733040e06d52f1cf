"""Metrics against the libraries that define them; intervals hold the truth as often as they say."""

import random

import numpy as np
import pytest
from sacrebleu.metrics import CHRF
from sklearn.metrics import accuracy_score, f1_score

from zerokara.evaluation import scoring
from zerokara.evaluation.scoring import METRICS, Measure, share

LABELS = ("good", "bad", "so so")
TRIALS = 100
STRAY = 3 * (0.05 * 0.95 / TRIALS) ** 0.5
"""Three standard errors of a share of 95 % found in so many trials."""


def labelled(num: int = 200) -> tuple[list[str], list[str]]:
    """Outputs and references; some outputs are no label."""
    chance = random.Random(3)
    references = chance.choices(LABELS, (5, 3, 1), k=num)
    return [answer if chance.random() < 0.6 else chance.choice((*LABELS, "x", "")) for answer in references], references


def test_accuracy_and_macro_f1_are_scikit_learns() -> None:
    outputs, references = labelled()
    assert METRICS["accuracy"](outputs, references).value == pytest.approx(accuracy_score(references, outputs))
    expected = f1_score(references, outputs, labels=LABELS, average="macro", zero_division=0)
    assert METRICS["macro_f1"](outputs, references).value == pytest.approx(expected)


def test_an_output_that_is_no_label_is_wrong_and_reported() -> None:
    outputs, references = ["good", "excellent", " bad\n", "", "excellent"], ["good", "good", "bad", "bad", "bad"]
    assert METRICS["accuracy"](outputs, references).value == 2 / 5
    assert METRICS["macro_f1"](outputs, references).value == pytest.approx((2 / 3 + 2 / 4) / 2)
    assert scoring.unmatched(outputs, LABELS) == ["excellent", "", "excellent"]


def test_exact_match_sees_everything_but_white_space_around_and_the_way_of_composing() -> None:
    outputs = [" a b\n", "a  b", "A b", "s\u0326i", "și"]
    references = ["a b", "a b", "a b", "și", "şi"]
    assert METRICS["exact_match"](outputs, references).statistics[:, 0].tolist() == [1, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("output", "reference", "right", "total"),
    [
        ("fața, sta!", "fața stă", 1, 2),  # punctuation is no word
        ("b a", "a b", 0, 2),  # as many words: by position
        ("x a b c", "a b c", 3, 3),  # else aligned
        ("", "a b", 0, 2),
        ("हिन्दी में", "हिन्दी मे", 1, 2),  # vowel signs belong to words
        ("私は猫が好きです。", "私は犬が好きです。", 7, 8),  # a character, where words have no spaces between them
        ("ABC は 2回", "ABC が 2回", 3, 4),
        ("[猫]・-", "猫", 1, 1),
    ],
)
def test_words_stand_at_their_place(output: str, reference: str, right: int, total: int) -> None:
    assert METRICS["word_accuracy"]([output], [reference]).statistics.tolist() == [[right, total]]
    both = METRICS["word_accuracy"]([output, "x"], [reference, "x"])
    assert both.value == (right + 1) / (total + 1), "over words, not over examples"


def test_chrf_is_sacrebleus() -> None:
    chance = random.Random(1)
    references = [" ".join(chance.choices(["alfa", "beta", "gama", "delta", "și"], k=9)) for _ in range(20)]
    outputs = [" ".join(word[:-1] if chance.random() < 0.3 else word for word in text.split()) for text in references]
    found = METRICS["chrf"](outputs, references)
    assert found.value == pytest.approx(CHRF().corpus_score(outputs, [references]).score / 100)
    assert found.subset([3]).value == pytest.approx(CHRF().sentence_score(outputs[3], [references[3]]).score / 100)


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_one_where_all_is_right_and_intervals_hold_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "NUM_RESAMPLES", 300)
    (outputs, references), metric = labelled(), METRICS[name]
    assert metric(references, references).value == pytest.approx(1.0)
    found = metric(outputs, references)
    interval = found.interval()
    assert found.name == name
    assert interval is not None and interval.low < found.value < interval.high < interval.low + 0.2
    assert metric(outputs[:1], references[:1]).interval() is None


def test_wilson_is_the_published_interval() -> None:
    # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    for right, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        hits = [True] * right + [False] * (n - right)
        assert share("hits", hits, [1] * n).interval() == pytest.approx((low, high), abs=6e-5)
    none, all_right = (METRICS["accuracy"]([output] * 50, ["a"] * 50).interval() for output in ("x", "a"))
    assert none and all_right and none.low == 0 and all_right.high == 1


def documents(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Bits and bytes of documents that differ in length and in difficulty; the true ratio is 2."""
    lengths = random.integers(50, 500, 60)
    return lengths * random.gamma(8, 2 / 8, 60), lengths


def test_intervals_of_documents_and_of_paired_differences_hold_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin resamples each document's tokens one by one, as if they told ten times as much."""
    monkeypatch.setattr(scoring, "NUM_RESAMPLES", 300)
    random, truths = np.random.default_rng(1), {"alone": 2.0, "tokens": 2.0, "paired": 0.05}
    held, widths = dict.fromkeys(truths, 0.0), []
    for trial in range(TRIALS):
        bits, lengths = documents(random)
        measure, better = share("x", bits, lengths), bits - lengths * random.normal(0.05, 0.1, 60)
        tokens = share("x", np.repeat(bits / 10, 10), np.repeat(lengths / 10, 10))
        found = {
            "alone": measure.interval(trial),
            "tokens": tokens.interval(trial),
            "paired": measure.difference(share("x", better, lengths), trial),
        }
        for name, interval in found.items():
            held[name] += (interval.low <= truths[name] <= interval.high) / TRIALS
        alone, _, paired = (np.ptp(interval) for interval in found.values() if interval)
        widths.append(paired / alone)
    assert abs(held["alone"] - 0.95) < STRAY and abs(held["paired"] - 0.95) < STRAY and held["tokens"] < 0.6
    assert np.mean(widths) < 0.25


def test_what_has_nothing_to_measure_has_no_interval() -> None:
    both = METRICS["macro_f1"](["a", "a", "b"], ["a", "a", "b"])
    assert both.subset([0, 1]).value == 1.0 and np.isnan(both.subset([]).value)
    assert share("x", [3.0], [2.0]).interval(1) is None and share("x", [0.0] * 3, [0.0] * 3).interval(1) is None
    found = Measure("x", np.array([[1.0, 1.0], [0.0, 0.0]]), scoring.ratio).interval()
    assert found is not None and found.low == 1.0, "resamples without any are left out"
    same = found and both.difference(both)
    assert same is not None and same == (0, 0) and not same.excludes_zero
