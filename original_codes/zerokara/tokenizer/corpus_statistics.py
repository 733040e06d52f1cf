"""Statistics of a corpus, estimated from the beginnings of its files, before a sample is drawn.

In: files. Out: `CorpusStatistics`: how much text there is, its lines and words, and how the number of distinct words
grows with the text (Heaps' law, fitted to half of the text that was read and to all of it).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate

import numpy as np

from zerokara.corpus import sizes
from zerokara.corpus.inputs import InputFile
from zerokara.corpus.reading import Document, Range, TxtDocument, read
from zerokara.tokenizer.sampling import passages_of, sentences_of

HEAD_BYTES = 8_000_000
"""Text read in all."""
MAX_FILES = 16
"""Positions, evenly spread over the bytes of the corpus, whose files are read; a large file may hold several."""
_WORD = re.compile(" *[^ \n]+")
"""As in the trainer: a word begins with the spaces before it."""


@dataclass(frozen=True)
class DistinctWords:
    """Counts of the distinct words of a text."""

    count: float
    characters: float
    pairs: float
    """Distinct pairs of adjacent characters in them."""


@dataclass(frozen=True)
class CorpusStatistics:
    """Estimates for the corpus; counts are of the bytes that were read."""

    offered_bytes: int
    """Text in the whole corpus."""
    bytes: int
    lines: int
    """Training sentences."""
    passages: int
    """Documents, or the parts in which long ones are sampled."""
    spaces: int
    half_bytes: int
    """Of every second passage."""
    half_words: DistinctWords
    words: DistinctWords

    def words_in(self, num_bytes: float) -> DistinctWords:
        """The distinct words that so much text will have."""
        doubling = math.log(max(1, self.bytes) / max(1, self.half_bytes)) if self.half_bytes < self.bytes else 1.0
        half, whole = np.array(astuple(self.half_words)), np.array(astuple(self.words))
        powers = np.clip(np.log(np.maximum(1, whole) / np.maximum(1, half)) / doubling, 0, 1)
        return DistinctWords(*(whole * (num_bytes / max(1, self.bytes)) ** powers).tolist())


def statistics_of(files: Sequence[InputFile], text_field: str, txt_document: TxtDocument) -> CorpusStatistics:
    """Read the beginnings of up to `MAX_FILES` files, in about a second."""
    ends = list(accumulate(file.bytes for file in files))
    total = ends[-1]
    positions = ((2 * i + 1) * total // (2 * MAX_FILES) for i in range(MAX_FILES))
    picked = Counter(min(bisect_right(ends, position), len(files) - 1) for position in positions)
    texts: list[str] = []
    text_share = 0.0  # of the bytes on disk
    for number, times in sorted(picked.items()):
        head, text_bytes = _head(files[number], times * HEAD_BYTES // MAX_FILES, text_field, txt_document)
        texts += head
        text_share += times / MAX_FILES * text_bytes / max(1, files[number].bytes)
    passages = [passage for text in texts for passage in passages_of(text)]
    sentences = [sentence for passage in passages for sentence in sentences_of(passage)]
    return CorpusStatistics(
        offered_bytes=round(text_share * total),
        bytes=sum(len(sentence.encode()) for sentence in sentences),
        lines=len(sentences),
        passages=len(passages),
        spaces=sum(sentence.count(" ") for sentence in sentences),
        half_bytes=sum(len(passage.encode()) for passage in passages[::2]),
        half_words=_distinct_words(passages[::2]),
        words=_distinct_words(passages),
    )


def _head(file: InputFile, limit: int, text_field: str, txt_document: TxtDocument) -> tuple[list[str], float]:
    """The first documents of a file, and its text in bytes, if the rest is like them."""
    texts: list[str] = []
    num_bytes, last = 0, None
    # A .txt that is one document is looked at by its lines: it may be of any size.
    for item in read(Range(file), text_field, "line" if file.format == "txt" else txt_document):
        if num_bytes >= limit:
            last = item
            break
        if isinstance(item, Document):
            texts.append(item.text)
            num_bytes += len(item.text.encode())
    if last is None:
        return texts, num_bytes
    return texts, num_bytes * sizes.plain_bytes(file) / max(1, sizes.bytes_before(last))


def _distinct_words(passages: Sequence[str]) -> DistinctWords:
    words = {word for passage in passages for word in _WORD.findall(passage)}
    codes = np.frombuffer("\n".join(words).encode("utf-32-le"), dtype=np.uint32).astype(np.int64)
    pairs = np.unique((codes[:-1] << 21 | codes[1:])[(codes[:-1] != ord("\n")) & (codes[1:] != ord("\n"))])
    return DistinctWords(len(words), len(codes) - max(0, len(words) - 1), len(pairs))
