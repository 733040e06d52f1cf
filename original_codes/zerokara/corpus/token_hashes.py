"""Texts → their tokens, 64-bit hashes of these, and of every n in a row: what two texts share, in any language.

Tokens are words in lower case; in scripts that are written without spaces, single characters. So one measure serves
all languages: five tokens in a row are five words, or five characters. How much two texts share is counted in words, of
three characters each (`tokens_per_word`). Where texts that differ in them must not be the same (`+` and `-`, ``Yes.``
and ``Yes?``, an emoji), each sign is a token, too.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Hashes = NDArray[np.uint64]
MIN_WORDS = 8
"""A text with fewer words is not looked for by n-grams: "very good film" is everywhere."""
UNSPACED = (  # from Thai to Batak, Chinese to Yi, Javanese to Tai Viet, old scripts, Tangut, kana, Chinese again
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\u1b00-\u1b7f\u1bc0-\u1bff\u2e80-\u2fdf"
    "\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3038-\u303c\u3041-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\ua4cf\ua980-\uaadf\uf900-\ufaff\uff66-\uff9f\U00011000-\U0001107f\U00011300-\U0001137f"
    "\U00011700-\U0001174f\U00011900-\U0001195f\U00011ee0-\U00011eff\U00016fe0-\U00018dff\U0001b000-\U0001b2ff"
    "\U00020000-\U0003ffff"
)
"""Scripts that Unicode breaks into lines without spaces; ranges, for `re` is four times as fast as `regex`."""
_MARKS = "".join(
    mark for mark in map(chr, range(0x300, 0x1F000)) if unicodedata.category(mark) in ("Mn", "Mc") and
    not re.match(f"[{UNSPACED}]", mark)
)  # fmt: skip
r"""Marks inside words, which `\w` leaves out: accents, tones, the vowels of Hebrew, Arabic and the scripts of India."""
_WORD = rf"[^\W{UNSPACED}]+(?:[{_MARKS}][^\W{UNSPACED}]*)*|[{UNSPACED}]"
_TOKEN, _TOKEN_OR_SIGN = re.compile(_WORD), re.compile(rf"{_WORD}|[^\w\s]")
_IGNORED = re.compile("[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
"""Characters that nobody sees: soft hyphens, joiners, spaces of no width, directions."""
_HEAD_CHARACTERS = 2000
_PART = re.compile(r"(\w?\W{63})")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that no bit of a hash is lost (the golden ratio in 64 bits)."""


def composed(text: str) -> str:
    """A text in composed form (NFC), by 63 marks in a row: for more, Python takes the square of their number."""
    parts = [text] if unicodedata.is_normalized("NFC", text) else _PART.split(text)
    return "".join(unicodedata.normalize("NFC", part) for part in parts)


def words(text: str, with_signs: bool = False) -> list[str]:
    """The tokens of a text, in order."""
    return (_TOKEN_OR_SIGN if with_signs else _TOKEN).findall(composed(_IGNORED.sub("", text)).lower())


def tokens_per_word(text: str) -> int:
    """How many tokens say as much as a word: 3 in scripts without spaces, where a token is a character; else 1."""
    head = text[:_HEAD_CHARACTERS]
    return 3 if 3 * len(re.findall(f"[{UNSPACED}]", head)) > len(head) else 1


def is_short(text: str) -> bool:
    """True if a text has fewer words than are looked for by n-grams."""
    return len(words(text)) < MIN_WORDS * tokens_per_word(text)


def hashes_of(text: str, with_signs: bool = False) -> Hashes:
    """The hash of each token; some 25 MB a second."""
    return np.fromiter(map(xxh3_64_intdigest, map(str.encode, words(text, with_signs))), np.uint64)


def ngrams(hashes: Hashes, size: int) -> Hashes:
    """One number for each `size` tokens in a row; among 10^10 tokens fewer than one of a hundred such runs is wrong."""
    num = max(0, len(hashes) - size + 1)
    combined = np.zeros(num, np.uint64)
    for start in range(size):
        combined = combined * _FACTOR + hashes[start : start + num]
    return combined


class NgramIndex:
    """N-grams of texts, by size (`longest`, or a shorter text's own): in rising order, and the owner of each; 12 bytes
    each."""

    def __init__(self, texts: Iterable[tuple[int, Hashes, int]], longest: int):
        """Index texts by their tokens, each with its owner before, and `tokens_per_word` after; `longest` in words."""
        self.num_short = 0
        """Texts that are left out, since they have fewer than `MIN_WORDS`."""
        found: dict[int, list[tuple[Hashes, NDArray[np.int32]]]] = defaultdict(list)
        for owner, hashes, word in texts:
            self.num_short += len(hashes) < MIN_WORDS * word
            if len(hashes) >= MIN_WORDS * word:
                size = min(longest * word, len(hashes))
                known = np.unique(ngrams(hashes, size))
                found[size].append((known, np.full(len(known), owner, np.int32)))
        self._by_size = {}
        for size, parts in found.items():
            known, owners = (np.concatenate(each) for each in zip(*parts, strict=True))
            order = np.argsort(known, kind="stable")
            self._by_size[size] = known[order], owners[order]

    def __len__(self) -> int:
        return sum(len(known) for known, _ in self._by_size.values())

    def owners_of(self, hashes: Hashes) -> Iterator[int]:
        """Owners of the n-grams that these tokens have too."""
        for size, (known, owners) in self._by_size.items():
            found = ngrams(hashes, size)
            first, after = (np.searchsorted(known, found, side) for side in ("left", "right"))
            places = np.flatnonzero(after > first)
            for place in places[np.sort(np.unique(first[places], return_index=True)[1])]:  # once, where a run repeats
                yield from owners[first[place] : after[place]].tolist()
