"""Baselines on small data whose answers are known."""

from __future__ import annotations

import random

from zerokara.evaluation import baselines
from zerokara.evaluation import scoring as metrics
from zerokara.evaluation.baselines import Forms

PAIRS = [
    ("fata sta", "fața stă"),
    ("fata de masa", "față de masă"),
    ("o fata", "o fată"),
    ("Fata sta pe masa", "Fața stă pe masă"),
    ("fata sta", "fața stă"),
]


def restored(source: str, with_left: bool = False, pairs: list[tuple[str, str]] = PAIRS) -> str:
    return Forms(pairs).restored(source, with_left)


def test_each_word_takes_its_most_frequent_form_and_the_rest_stays() -> None:
    assert restored("o fata,  sta pe: casa!") == "o fața,  stă pe: casa!"


def test_the_word_on_the_left_decides_where_it_was_seen() -> None:
    assert restored("o fata sta", with_left=True) == "o fată stă"
    assert restored("nu fata sta", with_left=True) == "nu fața stă"


def test_a_word_begins_each_text_anew() -> None:
    pairs = [("x a", "x á"), ("a", "a"), ("a", "a"), ("y a", "y á")]
    assert restored("a", with_left=True, pairs=pairs) == "a"
    assert restored("x a", with_left=True, pairs=pairs) == "x á"


def test_baselines_of_texts() -> None:
    sources = ["o fata", "sta"]
    found = dict(baselines.for_texts(PAIRS, sources))
    assert found == {
        "copy": sources,
        "most_frequent_form": ["o fața", "stă"],
        "most_frequent_form_left": ["o fată", "stă"],
    }
    translated = [("one two three", "unu"), ("two", "doi doi"), ("three", "trei")]
    assert [name for name, _ in baselines.for_texts(translated, sources)] == ["copy"]
    assert [name for name, _ in baselines.for_texts([], sources)] == ["copy"]


def reviews(num: int, seed: int) -> list[tuple[str, str]]:
    """Texts whose label a word tells, now and then misspelt so that only its characters do."""
    chance = random.Random(seed)
    pairs = []
    for _ in range(num):
        label, word = chance.choice([("positive", "wonderful"), ("negative", "terrible")])
        if chance.random() < 0.5:
            word += chance.choice("abcdefgh") * chance.randint(1, 4)
        text = [word, *chance.choices(["film", "seen", "today", "again", "actor"], k=4)]
        chance.shuffle(text)
        pairs.append((" ".join(text), label))
    return pairs


def test_baselines_of_labels() -> None:
    train, test = reviews(150, 1), reviews(100, 2)
    sources, references = [source for source, _ in test], [target for _, target in test]
    found = dict(baselines.for_labels(train, sources, references))
    values = {name: metrics.accuracy(outputs, references).value for name, outputs in found.items()}
    assert list(values) == ["majority", "bag_of_words", "character_ngrams"]
    assert values["majority"] == max(references.count(label) for label in set(references)) / 100
    assert values["majority"] + 0.1 < values["bag_of_words"] < values["character_ngrams"]
    assert values["character_ngrams"] == 1.0


def test_without_training_pairs_or_with_one_label_only_the_majority_is_left() -> None:
    for train in ([], [("a", "x"), ("b", "x")]):
        found = list(baselines.for_labels(train, ["a", "b", "c"], ["y", "x", "y"]))
        assert found == [("majority", ["y"] * 3)]


def test_words_of_one_letter_count_in_the_bag() -> None:
    train = [("o a", "1"), ("o b", "2")] * 5
    assert baselines.classified(train, ["a", "b"], "word", (1, 1)) == ["1", "2"]


def test_scripts_without_spaces_have_words_and_texts_without_any_no_baseline() -> None:
    liked = [("この映画が好きです" + chr(0x4E00 + number), "1") for number in range(600)]
    hated = [("嫌いな話だった" + chr(0x5000 + number), "0") for number in range(600)]
    assert baselines.classified(liked + hated, ["好き", "嫌い"], "word", (1, 1)) == ["1", "0"]
    nothing = [(f"{mark}!", label) for mark, label in (("-", "0"), ("+", "1"))]
    found = baselines.for_labels(nothing, ["?"], ["1"])
    assert [name for name, _ in found] == ["majority", "character_ngrams"]
