"""The report on a task that restores diacritics: every target is its source with combining marks added.

Such a task is known by its data: source and target have the same letters once the combining marks are taken away
(Unicode's decomposition NFD, category Mn: ș → s + comma below). Letters that do not decompose (đ, ł, ø) are letters.

A *character* is a letter with its marks. Beside words and sentences right, which hide how hard a text is, the report
gives the error on *diacritisable* letters, those that carry a mark somewhere in the training data or the references:
most characters of a text can only be copied. An output with a *changed base letter* has not only marks added: the model
has written another text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from zerokara.evaluation import metrics
from zerokara.evaluation.measures import Measure, share


def characters(text: str) -> list[str]:
    """The characters of a text, each a letter with its combining marks, decomposed and in Unicode's order."""
    found: list[str] = []
    for point in unicodedata.normalize("NFD", text):
        if found and unicodedata.category(point) == "Mn":
            found[-1] += point
        else:
            found.append(point)
    return found


def base_letters(text: str) -> str:
    """The text without combining marks."""
    return "".join(point for point in unicodedata.normalize("NFD", text) if unicodedata.category(point) != "Mn")


def restores_diacritics(pairs: Iterable[tuple[str, str]]) -> bool:
    """Whether each target differs from its source in combining marks only, and some do."""
    some = False
    for source, target in pairs:
        if source == target:
            continue
        if base_letters(source) != base_letters(target):
            return False
        some = some or unicodedata.normalize("NFD", source) != unicodedata.normalize("NFD", target)
    return some


def diacritisable(targets: Iterable[str]) -> frozenset[str]:
    """The base letters, in lower case, that carry a mark somewhere in `targets`."""
    return frozenset(
        character[0].lower() for target in targets for character in characters(target) if len(character) > 1
    )


def report(
    outputs: Sequence[str], references: Sequence[str], sources: Sequence[str], letters: frozenset[str] = frozenset()
) -> list[Measure]:
    """The measures of a restoration; `letters` are diacritisable ones beside those of the references."""
    letters = letters | diacritisable(references)
    right, total, wrong, chances, changed = [], [], [], [], []
    for output, reference, source in zip(outputs, references, sources, strict=True):
        expected = characters(metrics.clean(reference))
        in_place = _in_place(characters(metrics.clean(output)), expected)
        open_to_marks = [character[0].lower() in letters for character in expected]
        right.append(sum(in_place))
        total.append(len(expected))
        chances.append(sum(open_to_marks))
        wrong.append(sum(is_open and not stands for is_open, stands in zip(open_to_marks, in_place, strict=True)))
        changed.append(base_letters(metrics.clean(output)) != base_letters(metrics.clean(source)))
    return [
        share("characters_right", right, total),
        metrics.word_accuracy(outputs, references),
        share("sentences_right", metrics.exact_match(outputs, references).statistics[:, 0], [1] * len(right)),
        share("diacritisable_letter_error", wrong, chances, higher_is_better=False),
        share("changed_base_letter", changed, [1] * len(changed), higher_is_better=False),
    ]


def _in_place(found: Sequence[str], expected: Sequence[str]) -> list[bool]:
    """For each expected character whether it stands at its place: aligned by base letters, which should be the same."""
    if len(found) == len(expected):
        return [a == b for a, b in zip(found, expected, strict=True)]
    before = _num_common(found, expected)
    after = _num_common(found[before:][::-1], expected[before:][::-1])
    # The rest alone: the time grows with the product of the lengths.
    middle, open_ = found[before : len(found) - after], expected[before : len(expected) - after]
    stands = [False] * len(open_)
    for block in SequenceMatcher(None, middle, open_, autojunk=False).get_matching_blocks():
        stands[block.b : block.b + block.size] = [True] * block.size
    return [True] * before + stands + [True] * after


def _num_common(one: Sequence[str], other: Sequence[str]) -> int:
    """Characters that both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
