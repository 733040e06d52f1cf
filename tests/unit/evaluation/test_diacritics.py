"""The report on restored diacritics, by hand."""

from __future__ import annotations

from difflib import SequenceMatcher

import pytest

from zerokara.evaluation import diacritics


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([("sta", "stă"), ("da", "da")], True),
        ([("sta", "sta\u0306")], True),  # decomposed
        ([("da", "da")], False),  # nothing to restore
        ([("\u00e9", "e\u0301")], False),  # the same text
        ([("sta", "stă"), ("da", "nu")], False),
        ([("sta", "Stă")], False),
        ([("lodz", "łodz")], False),  # ł is a letter
    ],
)
def test_a_task_is_known_by_its_data(pairs: list[tuple[str, str]], expected: bool) -> None:
    assert diacritics.restores_diacritics(pairs) is expected


def test_characters_have_their_marks() -> None:
    assert diacritics.characters("\u0301și") == ["\u0301", "s\u0326", "i"]
    assert diacritics.base_letters("Încă și ăsta") == "Inca si asta"
    assert diacritics.diacritisable(["Îi", "dus"]) == {"i"}


def test_the_report() -> None:
    sources = ["sta in casa", "da", "si"]
    references = ["stă în casă", "da", "și"]
    outputs = ["stă in casă", "da", "sș"]
    found = {
        each.name: each.statistics.sum(axis=0).tolist() for each in diacritics.report(outputs, references, sources)
    }
    # Letters a, i, s carry marks: s, a, i, a, s, a of the first sentence, a of the second, s and i of the third.
    assert found == {
        "characters_right": [11 - 1 + 2 + 0, 15],
        "word_accuracy": [2 + 1 + 0, 5],
        "sentences_right": [1, 3],
        "diacritisable_letter_error": [1 + 0 + 2, 9],
        "changed_base_letter": [1, 3],
    }
    higher = {each.name: each.higher_is_better for each in diacritics.report(outputs, references, sources)}
    assert [name for name, better in higher.items() if not better] == [
        "diacritisable_letter_error",
        "changed_base_letter",
    ]


def test_letters_that_only_training_shows_are_diacritisable() -> None:
    def chances(letters: frozenset[str]) -> float:
        measures = {each.name: each for each in diacritics.report(["tu sti"], ["tu ști"], ["tu sti"], letters)}
        return float(measures["diacritisable_letter_error"].statistics[0, 1])

    assert (chances(frozenset()), chances(frozenset("t"))) == (1, 3)


def test_a_longer_output_is_aligned() -> None:
    found = {each.name: each.value for each in diacritics.report(["x stă"], ["stă"], ["sta"])}
    assert found["characters_right"] == 1.0 and found["changed_base_letter"] == 1.0
    assert found["sentences_right"] == 0.0


def test_only_what_differs_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the alignment grows with the product of the lengths."""
    aligned: list[int] = []

    def counts(_: None, one: list[str], other: list[str], autojunk: bool) -> SequenceMatcher[str]:
        aligned.append(max(len(one), len(other)))
        return SequenceMatcher(None, one, other, autojunk)

    monkeypatch.setattr(diacritics, "SequenceMatcher", counts)
    text = "ab" * 500
    stands = [True] * 1000 + [False] * 2 + [True] * 1000
    assert diacritics._in_place([*text, "x", *text], [*text, "y", "z", *text]) == stands
    assert diacritics._in_place([*"aaa"], [*"aa"]) == [True, True] and aligned == [2, 1]
