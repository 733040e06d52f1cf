"""Baselines on small data whose answers are known."""

import pytest

from zerokara.evaluation import baselines
from zerokara.evaluation.baselines import Forms

PAIRS = [
    ("fata sta", "fața stă"),
    ("fata de masa", "față de masă"),
    ("o fata", "o fată"),
    ("Fata sta pe masa", "Fața stă pe masă"),
    ("fata sta", "fața stă"),
]
LETTERS = [("x a", "x á"), ("a", "a"), ("a", "a"), ("y a", "y á")]


@pytest.mark.parametrize(
    ("pairs", "source", "with_left", "restored"),
    [
        (PAIRS, "o fata,  sta pe: casa!", False, "o fața,  stă pe: casa!"),  # what is between the words stays
        (PAIRS, "o fata sta", True, "o fată stă"),
        (PAIRS, "nu fata sta", True, "nu fața stă"),
        (LETTERS, "a", True, "a"),  # a text begins without a word on the left
        (LETTERS, "x a", True, "x á"),
    ],
)
def test_a_word_takes_its_usual_form(pairs: list[tuple[str, str]], source: str, with_left: bool, restored: str) -> None:
    assert Forms(pairs).restored(source, with_left) == restored


def test_baselines_of_texts() -> None:
    sources = ["o fata", "sta"]
    assert dict(baselines.for_texts(PAIRS, sources)) == {
        "copy": sources,
        "most_frequent_form": ["o fața", "stă"],
        "most_frequent_form_left": ["o fată", "stă"],
    }
    translated = [("one two three", "unu"), ("two", "doi doi"), ("three", "trei")]
    assert dict(baselines.for_texts(translated, sources)).keys() == {"copy"}
    assert dict(baselines.for_texts([], sources)).keys() == {"copy"}


def test_without_training_pairs_or_with_one_label_only_the_majority_is_left() -> None:
    for train in ([], [("a", "x"), ("b", "x")]):
        assert dict(baselines.for_labels(train, ["a", "b", "c"], ["y", "x", "y"])) == {"majority": ["y"] * 3}


def test_words_of_one_letter_and_of_scripts_without_spaces_count_and_texts_without_any_have_no_baseline() -> None:
    assert baselines.classified([("o a", "1"), ("o b", "2")] * 5, ["a", "b"], "word", (1, 1)) == ["1", "2"]
    liked = [("この映画が好きです" + chr(0x4E00 + number), "1") for number in range(600)]
    hated = [("嫌いな話だった" + chr(0x5000 + number), "0") for number in range(600)]
    assert baselines.classified(liked + hated, ["好き", "嫌い"], "word", (1, 1)) == ["1", "0"]
    nothing = [(f"{mark}!", label) for mark, label in (("-", "0"), ("+", "1"))]
    assert list(dict(baselines.for_labels(nothing, ["?"], ["1"]))) == ["majority", "character_ngrams"]
