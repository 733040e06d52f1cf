"""What is found to be a copy, and what is taken off the edges of a text."""

from pathlib import Path
from random import Random

import pytest
from corpus_files import json_lines

pytest.importorskip("datatrove")

from zerokara.cleaning import rules, stages
from zerokara.cleaning.plan import make_plan, saved
from zerokara.cleaning.rules import damage_of
from zerokara.config.clean_config import CleanConfig

WORDS = [f"{first}{last}" for first in "bcdfghjklmnprst" for last in ("ana", "eni", "iro", "omu", "uso")]


def _text(seed: int, num_words: int = 400) -> list[str]:
    return Random(seed).choices(WORDS, k=num_words)


def _copies(folder: Path, texts: list[str], **settings: object) -> dict[int, tuple[int, bool]]:
    """For each text that is a copy, the one that stays for it, and whether they are equal."""
    path = folder / "text.jsonl"
    path.write_bytes(json_lines(texts))
    config = CleanConfig(input=(str(path),), evaluation_data=(), **settings)  # type: ignore[arg-type]
    plan = make_plan(config)
    num_tasks = len(plan.tasks)
    for stage in (stages.read, stages.pairs):
        for rank in range(num_tasks):
            stage(plan, folder, rank, num_tasks)
    stages.choose(plan, folder, 0, 1)
    return {copy: (first, bool(is_equal)) for copy, first, is_equal in saved(folder, "dropped", 0).T.tolist()}


def test_equal_and_similar_texts_are_copies_of_the_first(tmp_path: Path) -> None:
    base, other = _text(1), _text(2)
    near = [*base[:100], "xx", *base[101:]]
    texts = [" ".join(each) for each in (base, other, base, near, near)]
    found = _copies(tmp_path, [*texts, texts[0].upper()])
    assert found == {2: (0, True), 3: (0, False), 4: (0, True), 5: (0, False)}


def test_a_chain_of_small_changes_drops_nothing_that_is_unlike_all_that_stays(tmp_path: Path) -> None:
    first = _text(1)
    second = [*first[:50], *_text(2, 30), *first[80:]]  # similarity 0.84
    third = [*second[:200], *_text(3, 30), *second[230:]]  # 0.84 to the second, 0.71 to the first
    assert _copies(tmp_path, [" ".join(each) for each in (first, second, third)]) == {1: (0, False)}
    assert _copies(tmp_path, [" ".join(each) for each in (second, first, third)]) == {1: (0, False), 2: (0, False)}


@pytest.mark.parametrize(
    ("settings", "expected"), [({"near_duplicates": 0}, [2]), ({"exact_duplicates": False}, [2, 3])]
)
def test_rules_that_are_off(settings: dict[str, object], expected: list[int], tmp_path: Path) -> None:
    base = _text(1)
    texts = [" ".join(each) for each in (base, _text(2), base, [*base[:9], "xx", *base[10:]])]
    assert [*_copies(tmp_path, texts, **settings)] == expected


def test_texts_without_words_are_no_copies_of_each_other(tmp_path: Path) -> None:
    assert _copies(tmp_path, ["...", "!!!", "...", "? ?"]) == {2: (0, True)}


def test_a_sign_an_operator_or_an_emoji_makes_another_text(tmp_path: Path) -> None:
    texts = ["Yes.", "Yes?", "Yes", "B+", "B-", "1 + 1", "1 - 1", "x < y", "x > y", "D", "D++", "D#", "-7 °C", "7 °C"]
    texts += ["seen it 👍", "seen it 👎", "¬p ∧ q", "p ∨ q"]
    texts += [f"for (i = 0; i < n; i++) s {operator} a[i];" for operator in ("+=", "-=")]
    assert not _copies(tmp_path, texts)
    assert _copies(tmp_path, ["Yes, it is.", "YES,  it is."]) == {1: (0, False)}, "without case and white space"


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("mtf", "t"), ("m ttt  f", "ttt"), ("mt", "mt"), ("tf", "tf"), ("Mt", "t"), ("tMt", "tMt"), ("mtff", "tf"),
        ("mM", ""), (" t ", " t "), ("", ""), ("1t", "1t"), ("1te", "1te"), ("p1te", "p1te"), ("1M t", "t"),
        ("M1t", "1t"), ("M  1t", "1t"),
    ],
)  # fmt: skip
def test_lines_of_a_site_are_taken_off_the_edges_and_those_that_books_share_are_not(text: str, own: str) -> None:
    """m and f are the short menu and footer of one site, M a long line; 1, p and e begin and end many books."""
    line = {
        "m": "Home | News | About",
        "f": "© All rights reserved.",
        "M": "We use cookies, and you have to accept them all.",
    }
    line |= {"1": "Chapter the First", "p": "Part the First", "e": "The End", "t": "its own text", " ": ""}
    keys = {letter: stages.line_key(each) for letter, each in line.items()}
    pairs = {stages.pair_key(keys[first], keys[following]) for first, following in ("fm", "e1", "ep", "p1")}
    start, end = stages.own_lines(
        [line[letter] for letter in text], ({*keys.values()} - {keys["t"]} | pairs).__contains__
    )
    assert text[start:end] == own


@pytest.mark.parametrize(
    ("menu", "is_site"),
    [
        ("ნაწილი პირველი, თავი მეორე", False), ("ክፍል አንድ፣ ምዕራፍ ሁለት", False), ("𝐏𝐚𝐫𝐭 𝐨𝐧𝐞", False),
        ("首页 新闻 关于我们 联系方式 隐私政策 使用条款", True), ("หน้าแรกข่าวเกี่ยวกับเราติดต่อ", True), ("第一章 海", False),
        ("ა" * 39, False), ("ა" * 40, True), ("أَعُوذُ بِاللَّهِ مِنَ الشَّيْطَانِ الرَّجِيمِ", False),
        ("किताब की दुकान में नई किताबें मिलती हैं", False),
    ],
)  # fmt: skip
def test_a_row_is_as_long_in_each_script_with_spaces_and_half_as_long_without(menu: str, is_site: bool) -> None:
    keys = {stages.line_key(menu)}
    assert stages.own_lines([menu, "its own text"], keys.__contains__) == (int(is_site), 2)


@pytest.mark.parametrize(
    "number",
    [
        "03-1234-5678",
        "０３－１２３４－５６７８",
        "（０３）１２３４－５６７８",
        "٠٥٠ ١٢٣ ٤٥٦٧",
        "०९८७६ ५४३२१",
        "๐๘๑ ๒๓๔ ๕๖๗๘",
    ],
)
def test_a_telephone_number_is_found_in_the_digits_of_any_script(number: str) -> None:
    assert "telephone numbers" in rules.personal_in(f"( {number} )")


def test_damage_is_told_from_text_of_many_languages() -> None:
    texts = [
        "A informação é útil às ações.",
        "ほんとうに、そうですか。",
        "Grüße aus Köln: 5 °C, 10 €!",
        "ș ț ă î â",
        "«Où?» – «Là»",
        "un [œ̃], brun [bʁœ̃]",
    ]
    assert not any(map(damage_of, [*texts, "plain text"]))
    for text in texts[:1] + texts[2:4]:
        assert damage_of(text.encode().decode("cp1252", "replace")) > 0.05
    assert damage_of("a\ufffdb\ufffd") == 0.5
