"""Which examples are found again, exactly and by n-gram."""

from __future__ import annotations

from zerokara.evaluation import overlap
from zerokara.evaluation.inputs import TaskData as Task

LONG = "the quick brown fox jumps over the lazy dog while the cat sleeps on a warm stone"


def test_exactly_up_to_white_space_and_the_way_of_composing() -> None:
    examples = [("good  film",), ("Good film",), ("e\u0301t\u00e9",), ("a good film",), ("absent",)]
    found = overlap.find(examples, [" good\tfilm ", "one\n\u00e9te\u0301\nthree", "a good", "film"])
    assert found.exact == [0, 2] and found.by_ngram == []
    assert found.found == [0, 2] and found.rest == [1, 3, 4]


def test_by_thirteen_words_in_a_row_whatever_their_case_and_punctuation() -> None:
    words = LONG.split()
    thirteen, twelve = " ".join(words[2:15]), " ".join(words[2:14])
    others = [f"Said he: {thirteen.upper()}!", f"and {twelve} then"]
    examples = [(LONG,), (LONG.replace("lazy", "idle"),)]
    assert overlap.find(examples, others[:1]).by_ngram == [0]
    assert overlap.find(examples, others[1:]).by_ngram == []


def test_shorter_texts_must_be_there_as_a_whole_and_very_short_ones_are_compared_exactly_only() -> None:
    nine, seven = " ".join(LONG.split()[:9]), " ".join(LONG.split()[:7])
    examples = [(nine,), (f"{nine} x",), (seven,)]
    assert overlap.find(examples, [f"so {LONG}"]).by_ngram == [0]
    assert overlap.find(examples, [seven]).exact == [2]


def test_a_short_answer_is_in_any_text() -> None:
    task = Task("task", "exact_match", ["Which town is it?", "source"], ["Paris", LONG])
    assert task.texts == [("Which town is it?",), ("source", LONG)]
    assert overlap.find(task.texts, ["Paris", LONG]).found == [1]


def test_any_text_of_an_example_counts() -> None:
    assert overlap.find([("source", LONG), ("source", "target")], [LONG]).found == [0]


def test_scripts_without_spaces_are_compared_by_characters() -> None:
    text = "吾輩は猫である。名前はまだ無い。どこで生れたか"
    assert overlap.tokens("猫であるABC 12") == ["猫", "で", "あ", "る", "abc", "12"]
    found = overlap.find([(text,), ("吾輩は犬である。名前はもう有る。ここで生れた",)], [f"夏目漱石、{text}頓と見当が"])
    assert found.by_ngram == [0]
    assert overlap.tokens("हिन्दी में") == ["हिन्दी", "में"]
