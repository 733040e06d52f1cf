"""Texts → 64-bit hashes of their tokens, lines and n-grams, in numpy: some 60 million characters a second on one core.

Tokens are words in lower case, without punctuation; of scripts that are written without spaces, single characters with
their marks. So one measure serves all languages: five tokens in a row are five words, or five characters.

The hash of a run x₀ x₁ … (a token of its characters, a line or an n-gram of its tokens) is Σ xᵢ·Bⁱ in 64 bits, mixed.
Those of all tokens are differences of sums over the whole text, times a power of B's inverse, which an odd B has.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import regex
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]
MIN_TOKENS = 8
"""A text with fewer tokens is looked for as a whole only: "very good film" is everywhere."""
UNSPACED = r"\p{Hiragana}\p{Katakana}\p{Han}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts that put no space between words."""
_BASE = 0x9E3779B97F4A7C15
"""Odd, so that no bit is lost (the golden ratio in 64 bits)."""
_PART = 1 << 18
"""Characters hashed at once, with some 50 bytes of memory each; longer texts are cut at a space, if there is one."""
_WORD, _MARK, _CHARACTER, _ATTACHED = 1, 2, 3, 4
"""Kinds of characters; attached is a mark that follows a single character. 0 is no part of a token."""
_MOST_MARKS = 8
_TOKEN = regex.compile(rf"(?V1)[{UNSPACED}]\p{{M}}*|[\w--[{UNSPACED}]]+")


@dataclass(frozen=True)
class Tokens:
    """Tokens of consecutive texts. A place is the number of tokens before a text or a line; the last one is the end."""

    hashes: Hashes
    texts: Places
    lines: Places
    """Lines of all texts in order, each text's as ``split("\\n")`` gives them; one without a token is empty."""

    def line_hashes(self) -> Hashes:
        """Hash of each line by its tokens, 0 of one without."""
        sums = np.zeros(len(self.lines) - 1, np.uint64)
        starts, sizes = self.lines[:-1], np.diff(self.lines)
        if len(self.hashes):
            within = np.arange(len(self.hashes)) - np.repeat(starts, sizes)
            terms = self.hashes * _powers()[0][within % _PART]
            sums[sizes > 0] = _mixed(np.add.reduceat(terms, starts[sizes > 0]))
        return sums

    def ngrams(self, size: int) -> tuple[Hashes, Places]:
        """Hashes of every `size` tokens in a row, and where those of each text begin, the last place the end.

        A text with fewer tokens gives one, of all of them; a text without a token gives none.
        """
        sizes = np.diff(self.texts)
        counts = np.maximum(sizes - size + 1, np.minimum(sizes, 1))
        first = np.repeat(self.texts[:-1] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        starts = np.arange(counts.sum()) + first
        ends = np.repeat(self.texts[1:], counts)
        sums = np.zeros(len(starts), np.uint64)
        for place in range(size):
            next_ones = self.hashes.take(starts + place, mode="clip")
            sums = sums * np.uint64(_BASE) + np.where(starts + place < ends, next_ones, np.uint64(0))
        return _mixed(sums), np.concatenate([[0], np.cumsum(counts)])


class NgramIndex:
    """N-grams of all examples, by size (`longest`, or a shorter text's own): their hashes in rising order, and the
    example of each; 12 bytes each."""

    def __init__(self, examples: Sequence[Sequence[str]], longest: int):
        texts = [text for each in examples for text in each]
        owners = np.repeat(np.arange(len(examples), dtype=np.int32), [len(each) for each in examples])
        sizes = np.minimum(np.diff(tokens_of(texts).texts), longest) if texts else np.zeros(0, np.int64)
        self.by_size: dict[int, tuple[Hashes, NDArray[np.int32]]] = {}
        for size in {*sizes.tolist()} - {*range(MIN_TOKENS)}:  # a shorter text is compared exactly only
            chosen = np.flatnonzero(sizes == size)
            hashes, starts = tokens_of([texts[index] for index in chosen]).ngrams(size)
            order = np.argsort(hashes)
            self.by_size[size] = hashes[order], np.repeat(owners[chosen], np.diff(starts))[order]

    def shared_with(self, others: Tokens) -> tuple[Places, Places]:
        """Number of an other text, and the example with which it shares an n-gram, for each such n-gram."""
        found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        for size, (known, owners) in self.by_size.items():
            hashes, starts = others.ngrams(size)
            first, after = (np.searchsorted(known, hashes, side) for side in ("left", "right"))
            hits = np.flatnonzero(after > first)
            counts = (after - first)[hits]
            places = np.arange(counts.sum()) + np.repeat(first[hits] - (np.cumsum(counts) - counts), counts)
            found.append((np.repeat(np.searchsorted(starts, hits, "right") - 1, counts), owners[places]))
        texts, examples = zip(*found, strict=True)
        return np.concatenate(texts), np.concatenate(examples)


def words(text: str) -> list[str]:
    """The tokens of a text themselves, some ten times slower."""
    return _TOKEN.findall(unicodedata.normalize("NFC", text).lower())


def tokens_of(texts: Sequence[str]) -> Tokens:
    """Find the tokens of texts, one or more."""
    joined = "\0".join(texts)
    if joined.count("\0") >= len(texts):  # which no document of a corpus holds, but maybe a test example
        joined = "\0".join(text.replace("\0", " ") for text in texts)
    joined = unicodedata.normalize("NFC", joined).lower()
    kinds, (powers, inverses) = _kinds(), _powers()
    found: list[Hashes] = []
    ends_of_texts: list[Places] = []
    ends_of_lines: list[Places] = []
    num_tokens = start = 0
    while start < len(joined):
        end = start + _PART
        if end < len(joined):
            end = max(joined.rfind(mark, start, end) + 1 for mark in "\0\n ") or end
        codes = np.frombuffer(joined[start:end].encode("utf-32-le", "surrogatepass"), np.uint32)
        kind = kinds[codes]
        before = np.concatenate([[np.uint8(0)], kind[:-1]])
        for _ in range(_MOST_MARKS):
            if not (attached := (kind == _MARK) & (before >= _CHARACTER)).any():
                break
            kind[attached] = _ATTACHED
            before[1:] = kind[:-1]
        is_apart = (before == 0) | (before >= _CHARACTER)
        firsts = np.flatnonzero((kind == _CHARACTER) | ((kind == _WORD) & is_apart) | ((kind == _MARK) & (before == 0)))
        terms = np.where(kind > 0, _mixed(codes.astype(np.uint64) + np.uint64(1)), np.uint64(0)) * powers[: len(codes)]
        sums = np.concatenate([[np.uint64(0)], np.cumsum(terms)])
        found.append(_mixed((sums[np.append(firsts[1:], len(codes))] - sums[firsts]) * inverses[firsts]))
        for ends, is_end in ((ends_of_texts, codes == 0), (ends_of_lines, (codes == 0) | (codes == ord("\n")))):
            ends.append(np.searchsorted(firsts, np.flatnonzero(is_end)) + num_tokens)
        num_tokens += len(firsts)
        start = end
    texts_, lines = (np.concatenate([[0], *ends, [num_tokens]]) for ends in (ends_of_texts, ends_of_lines))
    return Tokens(np.concatenate([*found, np.zeros(0, np.uint64)]), texts_, lines)


def _mixed(hashes: Hashes) -> Hashes:
    """Spread every bit over all of them (two rounds of a multiplicative hash)."""
    mixed = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return mixed ^ (mixed >> np.uint64(32))


@cache
def _kinds() -> NDArray[np.uint8]:
    """The kind of each character."""
    every = "".join(" " if 0xD800 <= code < 0xE000 else chr(code) for code in range(sys.maxunicode + 1))
    kinds = np.zeros(len(every), np.uint8)
    for pattern, kind in ((r"\w+", _WORD), (rf"[{UNSPACED}]+", _CHARACTER), (r"\p{M}+", _MARK)):
        for match in regex.finditer(pattern, every):
            kinds[match.start() : match.end()] = kind
    return kinds


@cache
def _powers() -> tuple[Hashes, Hashes]:
    """Powers of B, and of its inverse."""
    factors = (_BASE, pow(_BASE, -1, 1 << 64))
    powers, inverses = (np.cumprod(np.array([1, *[each] * _PART], np.uint64), dtype=np.uint64) for each in factors)
    return powers, inverses
