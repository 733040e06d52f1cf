"""Which test examples a model may have seen: in the training data of the task, or in the corpus of its pretraining.

A text of an example overlaps another text

* *exactly*, if it is one of the others, or a line of one, up to white space and Unicode's composed form;
* *by n-gram*, if the two share `NGRAM` tokens in a row; a text of fewer tokens must be in the other as a whole, and one
  of fewer than `MIN_TOKENS` is compared exactly only: "very good film" is everywhere.

Tokens are words in lower case, without punctuation; of scripts that are written without spaces, single characters.
13 is the length that the GPT-3 paper looks for (Brown et al. 2020, appendix C), 8 the least that it allows.

The indices of the examples found allow giving a score without them beside the score of all.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import regex

from zerokara.progress import Progress

NGRAM = 13
MIN_TOKENS = 8
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_TOKEN = regex.compile(rf"(?V1)[{_UNSPACED}]\p{{M}}*|[\w--[{_UNSPACED}]]+")


@dataclass(frozen=True)
class Overlap:
    """The test examples that occur among other texts; indices in rising order."""

    num_examples: int
    exact: list[int]
    """Examples of which a text is one of the others, or a line of one."""
    by_ngram: list[int]
    """Examples of which a text shares an n-gram with another; those that are found exactly may be among them."""

    @property
    def found(self) -> list[int]:
        """Examples found either way."""
        return sorted({*self.exact, *self.by_ngram})

    @property
    def rest(self) -> list[int]:
        """Examples not found."""
        found = {*self.exact, *self.by_ngram}
        return [index for index in range(self.num_examples) if index not in found]

    def part(self, start: int, num_examples: int) -> Overlap:
        """The overlap of `num_examples` examples from `start` on, counted from there."""
        inside = range(start, start + num_examples)
        exact, by_ngram = ([index - start for index in each if index in inside] for each in (self.exact, self.by_ngram))
        return Overlap(num_examples, exact, by_ngram)


def find(examples: Sequence[Sequence[str]], others: Iterable[str], progress: Progress | None = None) -> Overlap:
    """Look for `examples`, each of one text or several, among `others`, which are read once.

    `progress` advances by one for each of the others.
    """
    whole: dict[str, list[int]] = {}
    windows: dict[tuple[str, ...], list[tuple[tuple[str, ...], int]]] = {}
    for index, texts in enumerate(examples):
        for text in texts:
            whole.setdefault(normalized(text), []).append(index)
            for window in _windows(tokens(text)):
                windows.setdefault(window[:MIN_TOKENS], []).append((window, index))
    exact: set[int] = set()
    by_ngram: set[int] = set()
    for other in others:
        for line in {other, *other.splitlines()}:
            exact.update(whole.get(normalized(line), ()))
        if windows:
            by_ngram.update(_sharing(tokens(other), windows))
        if progress is not None:
            progress.advance()
    return Overlap(len(examples), sorted(exact), sorted(by_ngram))


def normalized(text: str) -> str:
    """A text up to white space and Unicode's composed form."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def tokens(text: str) -> list[str]:
    """Words in lower case, without punctuation; of scripts without spaces, single characters."""
    return _TOKEN.findall(unicodedata.normalize("NFC", text).lower())


def _windows(found: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The n-grams to look for: of `NGRAM` tokens, or all tokens of a shorter text."""
    if len(found) >= MIN_TOKENS:
        size = min(NGRAM, len(found))
        for start in range(len(found) - size + 1):
            yield tuple(found[start : start + size])


def _sharing(found: list[str], windows: dict[tuple[str, ...], list[tuple[tuple[str, ...], int]]]) -> Iterator[int]:
    """The examples that share a window with the tokens `found`; each window is known by its first tokens."""
    for start in range(len(found) - MIN_TOKENS + 1):
        for window, index in windows.get(tuple(found[start : start + MIN_TOKENS]), ()):
            if tuple(found[start : start + len(window)]) == window:
                yield index
