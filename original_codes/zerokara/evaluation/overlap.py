"""Overlap of test examples with what a model may have seen: the task's training data, the corpus of its pretraining.

A text of an example overlaps another text

* *exactly*, if it is one of the others, or a line of one, up to white space and Unicode's composed form;
* *by n-gram*, if the two share `NGRAM` tokens in a row; a text of fewer tokens must be in the other as a whole, and one
  of fewer than `MIN_TOKENS` is compared exactly only: "very good film" is everywhere.

Tokens are words in lower case, without punctuation; of scripts that are written without spaces, single characters.
13 is the length that the GPT-3 paper looks for (Brown et al. 2020, appendix C), 8 the least that it allows.

With the indices of the examples found, a score without them stands beside the score of all.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import regex
from numpy.typing import NDArray

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
    """Test examples that occur among other texts; indices in rising order."""

    num_examples: int
    exact: list[int]
    """Examples with a text that is one of the others, or a line of one."""
    by_ngram: list[int]
    """Examples with a text that shares an n-gram with another; those that are found exactly may be among them."""

    @property
    def found(self) -> list[int]:
        """Examples found either way."""
        return sorted({*self.exact, *self.by_ngram})

    @property
    def rest(self) -> list[int]:
        """Examples not found."""
        return sorted({*range(self.num_examples)}.difference(self.exact, self.by_ngram))

    def part(self, start: int, num_examples: int) -> Overlap:
        """Overlap of `num_examples` examples from `start` on, counted from there."""
        inside = range(start, start + num_examples)
        exact, by_ngram = ([index - start for index in each if index in inside] for each in (self.exact, self.by_ngram))
        return Overlap(num_examples, exact, by_ngram)


def find(examples: Sequence[Sequence[str]], others: Iterable[str]) -> Overlap:
    """Look for `examples`, each of one text or several, among `others`, which are read once."""
    whole: dict[str, list[int]] = {}
    by_size: dict[int, list[tuple[Hashes, int]]] = {}
    for index, texts in enumerate(examples):
        for text in texts:
            whole.setdefault(normalized(text), []).append(index)
            hashes = _hashes(tokens(text))
            if len(hashes) >= MIN_TOKENS:  # else it is compared exactly only
                size = min(NGRAM, len(hashes))
                by_size.setdefault(size, []).append((_window_hashes(hashes, size), index))
    windows = {size: _Windows(each) for size, each in by_size.items()}
    exact: set[int] = set()
    by_ngram: set[int] = set()
    for other in others:
        for line in {other, *other.splitlines()}:
            exact.update(whole.get(normalized(line), ()))
        if windows:
            hashes = _hashes(tokens(other))
            for size, known in windows.items():
                by_ngram.update(known.sharing(_window_hashes(hashes, size)))
    return Overlap(len(examples), sorted(exact), sorted(by_ngram))


class _Windows:
    """N-grams of one size in all examples: their hashes in rising order, and the example of each; 12 bytes each."""

    def __init__(self, found: Sequence[tuple[Hashes, int]]):
        hashes = np.concatenate([each for each, _ in found])
        indices = np.repeat(np.array([index for _, index in found], np.int32), [len(each) for each, _ in found])
        order = np.argsort(hashes)
        self._hashes, self._indices = hashes[order], indices[order]

    def sharing(self, found: Hashes) -> Iterator[int]:
        """Examples that share an n-gram with `found`."""
        first, after = (np.searchsorted(self._hashes, found, side) for side in ("left", "right"))
        for place in np.flatnonzero(after > first):
            yield from self._indices[first[place] : after[place]].tolist()


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
    combined = np.zeros(num, np.uint64)
    for start in range(size):
        combined = combined * _FACTOR + hashes[start : start + num]
    return combined
