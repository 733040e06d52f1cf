"""Tokens, and hashes of n of them in a row, against the tokens themselves."""

import re
import unicodedata
from random import Random

import pytest
import regex

from zerokara.corpus.token_hashes import MIN_WORDS, UNSPACED, NgramIndex, hashes_of, ngrams, tokens_per_word, words

TEXTS = [
    "Hello, World! don't\nstop",
    "春の海 終日\nのたりABCかな",
    "",
    "...",
    "a\n\nB a\n",
    "กำลัง ไป हिन्दी हिन्दी में",
    "x" * 700,
    "e\u0301te\u0301 été",
    "a test\0 example \ud800 of any kind",
]


def test_tokens_are_words_or_single_characters() -> None:
    assert words(TEXTS[0]) == ["hello", "world", "don", "t", "stop"]
    assert words("春の海ABCかな、猫") == ["春", "の", "海", "abc", "か", "な", "猫"]
    assert words("हिन्दी में, e\u0301té שָׁלוֹם") == ["हिन्दी", "में", "été", "שָׁלוֹם"]
    assert words("가나 다라") == ["가나", "다라"]


@pytest.mark.parametrize("word", ["ދިވެހި", "བོད", "ߒߞߏ߫", "ܣܘܪܝܝܐ", "ꯃꯩꯇꯩ", "ᮞᮥᮔ᮪ᮓ", "𞤆𞤵𞤤𞤢𞥄𞤪", "ᠮᠣᠩᠭᠣᠯ", "ไ"])
def test_a_word_is_whole_with_the_marks_of_its_script(word: str) -> None:
    assert words(f"{word} {word}") == [word.lower()] * 2


def test_characters_are_tokens_where_unicode_breaks_lines_between_letters() -> None:
    """Line_Break (UAX 14): complex context, ideographs and kana, and the aksaras of Brahmic scripts without spaces."""
    unspaced = regex.compile(r"[\p{lb=SA}\p{lb=ID}\p{lb=CJ}\p{lb=AK}\p{lb=AS}]")
    other = re.compile("HANGUL|FULLWIDTH|CIRCLED|PARENTHESIZED|ANNOTATION|NUMBER|DIGIT")
    letters = [
        one for one in map(chr, range(0x110000)) if one.isalpha() and not other.search(unicodedata.name(one, ""))
    ]
    named = [letter for letter in letters if unicodedata.name(letter, "")]
    wrong = [letter for letter in named if unspaced.match(letter) and not re.match(f"[{UNSPACED}]", letter)]
    assert not wrong and len(named) > 100_000
    assert words("ꦗꦮ ᬩᬮ ꀀꀁ ㄅㄆ") == list("ꦗꦮᬩᬮꀀꀁㄅㄆ")


def test_what_is_no_token() -> None:
    assert words("\ud800 ...") == []


@pytest.mark.parametrize("size", [1, 2, 5])
def test_equal_ngrams_have_equal_hashes_and_others_others(size: int) -> None:
    random = Random(1)
    texts = [*TEXTS, *(" ".join(random.choices(["ab", "ba", "a", "b", "猫", "犬"], k=40)) for _ in range(20))]
    of_ngram: dict[tuple[str, ...], int] = {}
    for text in texts:
        tokens, hashes = words(text), ngrams(hashes_of(text), size).tolist()
        assert len(hashes) == max(0, len(tokens) - size + 1)
        for start, value in enumerate(hashes):
            assert of_ngram.setdefault(tuple(tokens[start : start + size]), value) == value
    assert len({*of_ngram.values()}) == len(of_ngram)


def test_an_index_knows_whose_ngrams_a_text_has() -> None:
    numbers = [str(each) for each in range(100)]
    texts = [(0, " ".join(numbers[:30])), (1, " ".join(numbers[20:50])), (2, " ".join(numbers[60:69])), (3, "60 61")]
    index = NgramIndex([(owner, hashes_of(text), 1) for owner, text in texts], 13)
    assert {*index.owners_of(hashes_of(" ".join(numbers[10:45])))} == {0, 1}
    assert {*index.owners_of(hashes_of(" ".join(numbers[55:75])))} == {2}, "a short text is looked for as a whole"
    assert not {*index.owners_of(hashes_of(" ".join(numbers[61:75])))}
    assert not {*index.owners_of(hashes_of(" ".join(numbers[:12])))} and len(texts[3][1].split()) < MIN_WORDS
    assert index.num_short == 1


def test_a_name_in_a_script_without_spaces_is_no_copy() -> None:
    name, other = "กระทรวงศึกษาธิการ", "แถลงข่าวเรื่องการสอบเข้ามหาวิทยาลัยของนักเรียนชั้นมัธยมศึกษาตอนปลาย"
    assert tokens_per_word(name) == 3 and tokens_per_word("ministry of education 教育") == 1
    index = NgramIndex([(0, hashes_of(name + other), 3), (1, hashes_of(name), 3)], 13)
    assert index.num_short == 1, "17 characters are fewer than 8 words"
    assert not {*index.owners_of(hashes_of(f"{name}ประกาศวันหยุด"))}
    assert {*index.owners_of(hashes_of(f"ข่าว{other}"))} == {0}


def test_what_nobody_sees_makes_no_other_text() -> None:
    assert words("ភាសា\u200bខ្មែរ") == words("ភាសាខ្មែរ")
    assert words("cafe\u200d\u0301") == words("café") and words("a\u061cb") == ["ab"]
    assert words("infor\u00admation می\u200cخواهم\u200f") == words("information میخواهم")
