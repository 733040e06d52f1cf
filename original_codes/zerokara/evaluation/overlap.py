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

import numpy as np
import regex
from numpy.typing import NDArray

from zerokara.progress import Progress

NGRAM = 13
MIN_TOKENS = 8
_UNSPACED = r"\p{Hiragana}\p{Katakana}\p{Han}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts that put no space between words: each character, with its marks, counts as one."""
_TOKEN = regex.compile(rf"(?V1)[{_UNSPACED}]\p{{M}}*|[\w--[{_UNSPACED}]]+")
Hashes = NDArray[np.uint64]
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that no bit of a hash is lost (the golden ratio in 64 bits)."""


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
    by_size: dict[int, list[tuple[Hashes, int]]] = {}
    for index, texts in enumerate(examples):
        for text in texts:
            whole.setdefault(normalized(text), []).append(index)
            found = tokens(text)
            if len(found) >= MIN_TOKENS:  # else it is compared exactly only
                size = min(NGRAM, len(found))
                by_size.setdefault(size, []).append((_window_hashes(_hashes(found), size), index))
    windows = {size: _Windows.of(each) for size, each in by_size.items()}
    exact: set[int] = set()
    by_ngram: set[int] = set()
    for other in others:
        for line in {other, *other.splitlines()}:
            exact.update(whole.get(normalized(line), ()))
        if windows:
            hashes = _hashes(tokens(other))
            for size, known in windows.items():
                by_ngram.update(known.sharing(_window_hashes(hashes, size)))
        if progress is not None:
            progress.advance()
    return Overlap(len(examples), sorted(exact), sorted(by_ngram))


@dataclass(frozen=True)
class _Windows:
    """The n-grams of one size in all examples, 12 bytes each."""

    hashes: Hashes
    """In rising order."""
    indices: NDArray[np.int32]
    """The example of each."""

    @classmethod
    def of(cls, found: Sequence[tuple[Hashes, int]]) -> _Windows:
        hashes = np.concatenate([each for each, _ in found])
        indices = np.repeat(np.array([index for _, index in found], np.int32), [len(each) for each, _ in found])
        order = np.argsort(hashes)
        return cls(hashes[order], indices[order])

    def sharing(self, found: Hashes) -> Iterator[int]:
        """The examples that share an n-gram with `found`."""
        first, after = (np.searchsorted(self.hashes, found, side) for side in ("left", "right"))
        for place in np.flatnonzero(after > first):
            yield from self.indices[first[place] : after[place]].tolist()


def normalized(text: str) -> str:
    """A text up to white space and Unicode's composed form."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def tokens(text: str) -> list[str]:
    """Words in lower case, without punctuation; of scripts without spaces, single characters."""
    return _TOKEN.findall(unicodedata.normalize("NFC", text).lower())


def _hashes(found: Sequence[str]) -> Hashes:
    return np.fromiter(map(hash, found), np.int64, len(found)).view(np.uint64)


def _window_hashes(hashes: Hashes, size: int) -> Hashes:
    """One number for each `size` tokens in a row; among 10^10 tokens fewer than one of a hundred such runs is wrong."""
    num = max(0, len(hashes) - size + 1)
    made = np.zeros(num, np.uint64)
    for start in range(size):
        made = made * _FACTOR + hashes[start : start + num]
    return made
