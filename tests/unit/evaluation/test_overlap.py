"""Which examples are found again, exactly and by n-gram."""

from collections.abc import Sequence

import pytest

from zerokara.corpus.token_hashes import words
from zerokara.evaluation import overlap

LONG = "the quick brown fox jumps over the lazy dog while the cat sleeps on a warm stone"
WORDS = LONG.split()


def find(examples: Sequence[Sequence[str]], others: Sequence[str]) -> overlap.Overlap:
    (found,) = overlap.find([examples], others)
    return found


def test_exactly_up_to_white_space_and_the_way_of_composing() -> None:
    examples = [("good  film",), ("Good film",), ("e\u0301t\u00e9",), ("a good film",), ("absent",)]
    found = find(examples, [" good\tfilm ", "one\n\u00e9te\u0301\nthree", "a good", "film"])
    assert found.exact == found.found == [0, 2] and found.by_ngram == [] and found.rest == [1, 3, 4]


def test_by_thirteen_words_in_a_row_whatever_their_case_and_punctuation() -> None:
    thirteen, twelve = " ".join(WORDS[2:15]), " ".join(WORDS[2:14])
    examples = [(LONG,), (LONG.replace("lazy", "idle"),), ("source", LONG)]  # any text of an example counts
    assert find(examples, [f"Said he: {thirteen.upper()}!"]).by_ngram == [0, 2]
    assert find(examples, [f"and {twelve} then"]).by_ngram == []


def test_shorter_texts_must_be_there_as_a_whole_and_very_short_ones_are_compared_exactly_only() -> None:
    nine, seven = " ".join(WORDS[:9]), " ".join(WORDS[:7])
    examples = [(nine,), (f"{nine} x",), (seven,)]
    assert find(examples, [f"so {LONG}"]).by_ngram == [0]
    assert find(examples, [seven]).exact == [2]


def test_scripts_without_spaces_are_compared_by_characters() -> None:
    text, name = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと", "東京電力福島第一原子力発電所"
    assert words("猫であるABC 12") == ["猫", "で", "あ", "る", "abc", "12"]
    examples = [(text,), (text.replace("猫", "犬"),), (f"昨日の夕方に{name}の敷地内で説明会が開かれた",)]
    assert find(examples, [f"夏目漱石、{text}見当が", f"{name}について"]).by_ngram == [0]
    assert words("हिन्दी में") == ["हिन्दी", "में"]


@pytest.mark.parametrize("beside", [0, 500])
def test_an_instruction_that_most_examples_of_a_task_share_is_no_sign(beside: int) -> None:
    instruction = " ".join(f"rule{word}" for word in range(15))
    texts = [" ".join(f"w{index}x{word}" for word in range(15)) for index in range(80 + beside)]
    asked = [[f"{instruction} {text}"] for text in texts[:40]]
    others = [f"{instruction} {text}" for text in texts[40:80]] + [f"so {texts[1]} it is"]
    found, _ = overlap.find([asked, [[text] for text in texts[80:]]], others)
    assert (found.exact, found.by_ngram) == ([], [1])


def test_questions_on_one_passage_are_found() -> None:
    passage = " ".join(f"w{word}" for word in range(30))
    asked = [[f"{passage} who is {name} here", f"it says {passage}"] for name in "abcdefgh"]
    asked += [[f"nothing of it but {name} and so on and on and on", "no"] for name in "ij"]
    for number in (1, 2, 8, 10):
        assert find(asked[:number], [passage]).by_ngram == [*range(min(number, 8))]
