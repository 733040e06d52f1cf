"""Which examples are found again, exactly and by n-gram."""

import pytest

from zerokara.corpus.token_hashes import words
from zerokara.evaluation import overlap

LONG = "the quick brown fox jumps over the lazy dog while the cat sleeps on a warm stone"
WORDS = LONG.split()


def test_exactly_up_to_white_space_and_the_way_of_composing() -> None:
    examples = [("good  film",), ("Good film",), ("e\u0301t\u00e9",), ("a good film",), ("absent",)]
    found = overlap.find(examples, [" good\tfilm ", "one\n\u00e9te\u0301\nthree", "a good", "film"])
    assert found.exact == found.found == [0, 2] and found.by_ngram == [] and found.rest == [1, 3, 4]


def test_by_thirteen_words_in_a_row_whatever_their_case_and_punctuation() -> None:
    thirteen, twelve = " ".join(WORDS[2:15]), " ".join(WORDS[2:14])
    examples = [(LONG,), (LONG.replace("lazy", "idle"),), ("source", LONG)]  # any text of an example counts
    assert overlap.find(examples, [f"Said he: {thirteen.upper()}!"]).by_ngram == [0, 2]
    assert overlap.find(examples, [f"and {twelve} then"]).by_ngram == []


def test_shorter_texts_must_be_there_as_a_whole_and_very_short_ones_are_compared_exactly_only() -> None:
    nine, seven = " ".join(WORDS[:9]), " ".join(WORDS[:7])
    examples = [(nine,), (f"{nine} x",), (seven,)]
    assert overlap.find(examples, [f"so {LONG}"]).by_ngram == [0]
    assert overlap.find(examples, [seven]).exact == [2]


def test_scripts_without_spaces_are_compared_by_characters() -> None:
    text = "吾輩は猫である。名前はまだ無い。どこで生れたか"
    assert words("猫であるABC 12") == ["猫", "で", "あ", "る", "abc", "12"]
    found = overlap.find([(text,), ("吾輩は犬である。名前はもう有る。ここで生れた",)], [f"夏目漱石、{text}頓と見当が"])
    assert found.by_ngram == [0]
    assert words("हिन्दी में") == ["हिन्दी", "में"]


@pytest.mark.parametrize("number", [3, 40])
def test_an_instruction_that_all_examples_share_is_no_sign(number: int) -> None:
    instruction = " ".join(f"rule{word}" for word in range(15))
    texts = [" ".join(f"w{index}x{word}" for word in range(15)) for index in range(2 * number)]
    asked = [[f"{instruction} {text}"] for text in texts[:number]]
    found = overlap.find(asked, [f"{instruction} {text}" for text in texts[number:]] + [f"so {texts[1]} it is"])
    assert (found.exact, found.by_ngram) == ([], [1])
