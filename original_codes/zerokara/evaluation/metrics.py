"""The metrics of a task: outputs and references → a `Measure`.

All values are shares between 0 and 1, chrF too (sacrebleu's divided by 100). An output and a reference are compared
without white space around them and in Unicode's composed form (NFC), in which the same character is the same code
point. Nothing else is changed: case, punctuation and inner white space count.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

import numpy as np
import regex

from zerokara.evaluation.measures import Measure, Statistics, divided, share

WORD = regex.compile(r"\w+")
"""As Unicode defines a word character (UTS 18), with combining marks: those of `re` end a word at the vowel signs of
Devanagari."""


def accuracy(outputs: Sequence[str], references: Sequence[str]) -> Measure:
    """Examples whose output is the label's text; an output that is no label's text is wrong."""
    return replace(exact_match(outputs, references), name="accuracy")


def exact_match(outputs: Sequence[str], references: Sequence[str]) -> Measure:
    """Examples whose output is the reference."""
    hits = [clean(output) == clean(reference) for output, reference in zip(outputs, references, strict=True)]
    return share("exact_match", hits, [1] * len(hits))


def macro_f1(outputs: Sequence[str], references: Sequence[str]) -> Measure:
    """The mean over the labels of F1 = 2 · right / (outputs + references of that label).

    The labels are those that occur among the references (of a resample: among its references). An output that is no
    label's text is missing from its own label, and belongs to none.
    """
    answers = [clean(reference) for reference in references]
    labels = {label: place for place, label in enumerate(sorted(set(answers)))}
    statistics = np.zeros((len(answers), 3, len(labels)))
    for row, (output, answer) in enumerate(zip(map(clean, outputs), answers, strict=True)):
        statistics[row, 1, labels[answer]] = 1
        if output in labels:
            statistics[row, 2, labels[output]] = 1
            statistics[row, 0, labels[output]] = output == answer
    return Measure("macro_f1", statistics.reshape(len(answers), -1), _macro_f1)


def word_accuracy(outputs: Sequence[str], references: Sequence[str]) -> Measure:
    """Words of the references that stand at their place in the output.

    Words are runs of letters, digits and marks (`words`), so punctuation does not count. Where output and reference
    have equally many, the n-th belongs to the n-th; else they are aligned by difflib's matching blocks. Words that an
    output has beyond the reference's are not counted.
    """
    pairs = [(words(output), words(reference)) for output, reference in _cleaned(outputs, references)]
    return share("word_accuracy", [num_in_place(*pair) for pair in pairs], [len(expected) for _, expected in pairs])


def chrf(outputs: Sequence[str], references: Sequence[str]) -> Measure:
    """chrF2 of the corpus as sacrebleu computes it (character n-grams up to 6, no words, beta 2), divided by 100."""
    from sacrebleu.metrics import CHRF

    metric = CHRF()
    pairs = list(_cleaned(outputs, references))
    # sacrebleu's own bootstrap is made of these two (metrics/base.py, corpus_score), but gives no paired differences.
    rows = metric._extract_corpus_statistics([pair[0] for pair in pairs], [[pair[1] for pair in pairs]])

    def of_sums(sums: Statistics) -> Statistics:
        return np.apply_along_axis(lambda row: metric._compute_f_score(row.tolist()) / 100, -1, sums)

    return Measure("chrf", np.array(rows, np.float64).reshape(len(pairs), 3 * metric.order), of_sums)


METRICS: dict[str, Callable[[Sequence[str], Sequence[str]], Measure]] = {
    "accuracy": accuracy,
    "macro_f1": macro_f1,
    "exact_match": exact_match,
    "word_accuracy": word_accuracy,
    "chrf": chrf,
}
"""Metrics by their names in the settings; a further one is an entry here."""


@dataclass(frozen=True)
class Unmatched:
    """Outputs that are no label's text."""

    indices: list[int]
    most_common: list[tuple[str, int]]
    """The most frequent of them, with their counts."""


def unmatched(outputs: Sequence[str], labels: Sequence[str], num_shown: int = 5) -> Unmatched:
    """The outputs that match none of `labels`, which accuracy and macro-F1 count as wrong."""
    known = {clean(label) for label in labels}
    indices = [index for index, output in enumerate(outputs) if clean(output) not in known]
    return Unmatched(indices, Counter(outputs[index] for index in indices).most_common(num_shown))


def clean(text: str) -> str:
    """A text as it is compared: composed (NFC), without white space around it."""
    return unicodedata.normalize("NFC", text).strip()


def words(text: str) -> list[str]:
    """The words of a text: runs of letters, digits, underscores and combining marks."""
    return WORD.findall(text)


def num_in_place(found: Sequence[str], expected: Sequence[str]) -> int:
    """Elements of `expected` that stand at their place in `found`: by position, or aligned if their lengths differ."""
    if len(found) == len(expected):
        return sum(a == b for a, b in zip(found, expected, strict=True))
    matcher = SequenceMatcher(None, found, expected, autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks())


def _cleaned(outputs: Sequence[str], references: Sequence[str]) -> list[tuple[str, str]]:
    return [(clean(output), clean(reference)) for output, reference in zip(outputs, references, strict=True)]


def _macro_f1(sums: Statistics) -> Statistics:
    right, references, outputs = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, 0)
    occurs = references > 0
    f1 = np.where(occurs, divided(2 * right, references + outputs), 0.0)
    return divided(f1.sum(axis=-1), occurs.sum(axis=-1))
