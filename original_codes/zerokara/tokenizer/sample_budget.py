"""Size of the training sample and the memory that it takes, estimated before a tokenizer is trained.

In: the settings and the files, whose beginnings are read. Out: a `SampleBudget`. The factors are from the peak memory
of sentencepiece 0.2.3 on 14 bodies of text, 5 to 60 MB of Japanese, Korean and European languages:
- unigram, while it looks for candidates: the text, where a space is three bytes (U+2581), three arrays of 4 bytes for
  each of these bytes (suffixes, common prefixes and their inverse), and a constant for each line. Within 3 %.
- bpe, while it counts pairs: each distinct word, as characters with their positions. In a language without spaces most
  of a line is one word. Within 15 % where the words are known (random words without spaces take up to 70 % more); or,
  where lines are many and short (as with `pre_segment`), while it reads them.
- with `base_tokenizer` (tokenizers 0.23, 10 and 20 MB of Japanese and Romanian): the base itself, of 150,000 pieces,
  and each distinct word, by bytes or, with `extend`, by pieces of the base, in which the whole text is held besides.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.corpus.find import InputFile
from zerokara.corpus.read import Document, Range, TxtDocument, bytes_before, read, total_plain_bytes
from zerokara.errors import UserError
from zerokara.progress import bytes_text
from zerokara.resources import available_memory
from zerokara.tokenizer.sampling import PASSAGE_OVERHEAD_BYTES, passages_of, sentences_of

BASE_BYTES = 22_000_000
"""Memory of the training process without any text: Python and SentencePiece."""
AUTO_SHARE, SAFE_SHARE = 0.5, 0.8
"""Shares of the free memory that `auto` may use, and that a sample may need which an error recommends."""
AUTO_LEAST_BYTES, AUTO_MOST_BYTES, AUTO_MOST_BYTES_BASE = 10_000_000, 200_000_000, 50_000_000
"""More text than this hardly changes a vocabulary, and takes minutes per hundred megabytes; per ten with
`base_tokenizer` where words are not separated by spaces."""
HEAD_BYTES = 8_000_000
"""Text read in all for the statistics."""
MAX_FILES = 16
"""Positions, evenly spread over the bytes of the corpus, whose files are read; a large file may hold several."""
_WORD = re.compile("(?<! ) *+[^ \n]+")
"""As in the trainer: a word begins with the spaces before it, of which each run is tried once."""
_CHUNK_BYTES = 500_000_000
"""The unigram trainer looks for candidates in this much text at a time (`kMaxChunkBytes`)."""
_MORPHEMES_PER_BYTE = 0.22
"""In Japanese; Korean has 0.20."""

DistinctWords = npt.NDArray[np.float64]
"""Counts of a text's distinct words, of their characters, of the distinct pairs of adjacent characters in them, and of
their bytes."""


@dataclass(frozen=True)
class CorpusStatistics:
    """Estimated size of the corpus' text (`offered_bytes`), and counts over the `bytes` that were read.

    Lines are training sentences, passages are those of `sampling`; the half is every second passage.
    """

    offered_bytes: int
    bytes: int
    lines: int
    passages: int
    spaces: int
    half_bytes: int
    half_words: DistinctWords
    words: DistinctWords


@dataclass(frozen=True)
class SampleBudget:
    """Size of the sample, peak memory of the training and of the sampling before it, and what safely fits."""

    sample_bytes: int
    peak_bytes: int
    sampling_bytes: int
    available_bytes: int
    largest_bytes: int


def estimate(config: TokenizerConfig, files: Sequence[InputFile]) -> SampleBudget:
    """Resolve `sample_bytes: auto` and estimate the peak memory, from the beginnings of the files."""
    statistics, available = statistics_of(files, config.text_field, config.txt_document), available_memory()

    def sampling(sample_bytes: int) -> int:
        num_passages = statistics.passages * sample_bytes / max(1, statistics.bytes)
        return round(sample_bytes + PASSAGE_OVERHEAD_BYTES * num_passages)

    def peak(sample_bytes: int) -> int:
        return max(_training_bytes(config, statistics, sample_bytes), sampling(sample_bytes))

    def largest(memory_bytes: float) -> int:
        sizes = range(0, max(1, int(memory_bytes)), 10_000)
        return sizes[max(0, bisect_right(sizes, memory_bytes, key=peak) - 1)]

    most = AUTO_MOST_BYTES_BASE if config.base_tokenizer else AUTO_MOST_BYTES
    auto_bytes = max(AUTO_LEAST_BYTES, min(most, largest(AUTO_SHARE * available)))
    sample_bytes = auto_bytes if config.sample_bytes == "auto" else config.sample_bytes
    drawn = min(sample_bytes, statistics.offered_bytes)
    training_bytes = _training_bytes(config, statistics, drawn)
    return SampleBudget(sample_bytes, training_bytes, sampling(drawn), available, largest(SAFE_SHARE * available))


def check(config: TokenizerConfig, budget: SampleBudget) -> None:
    """Raise a `UserError`, with the largest sample that fits, where the machine lacks the memory."""
    needed = max(budget.peak_bytes, budget.sampling_bytes)
    if needed > budget.available_bytes:
        rule = f"needs about {bytes_text(needed)} of memory, and {bytes_text(budget.available_bytes)} are free"
        raise UserError(config.fault("sample_bytes", rule, f"set {budget.largest_bytes} or less, or auto"))


def _training_bytes(config: TokenizerConfig, statistics: CorpusStatistics, sample_bytes: int) -> int:
    """Return the peak memory of a training on `sample_bytes` of text."""
    share = sample_bytes / max(1, statistics.bytes)
    lines = share * statistics.lines
    if config.pre_segment != "none":
        lines += _MORPHEMES_PER_BYTE * sample_bytes
    text = sample_bytes + 2 * share * statistics.spaces + lines
    # The distinct words by Heaps' law, fitted to half of the text and to all of it.
    half_share = statistics.half_bytes / max(1, statistics.bytes)
    growth = np.log(np.maximum(1, statistics.words) / np.maximum(1, statistics.half_words))
    exponents = np.clip(growth / (-math.log(half_share) if 0 < half_share < 1 else 1.0), 0, 1)
    words, characters, pairs, word_bytes = (statistics.words * share**exponents).tolist()
    if config.base_tokenizer:
        return round(7.5e8 + (30 * word_bytes + 12 * sample_bytes if config.extend else 90 * word_bytes))
    if config.model_type == "unigram":
        return round(BASE_BYTES + 14 * min(text, _CHUNK_BYTES) + 1.6 * text + 31 * lines)
    reading, merging = 4.5 * text + 40 * lines, 0.0
    if config.pre_segment == "none":
        # Pairs of characters and their positions, one fewer in a word than it has characters; merges add to them.
        # Measured for 6,000 to 64,000 pieces.
        doublings = min(2.0, max(-2.5, math.log2(config.vocab_size / 32_000)))
        merging = (69 + 16 * doublings) * characters - (132 + 99 * doublings) * words + 789 * pairs
    return round(BASE_BYTES + max(reading, merging))


def statistics_of(files: Sequence[InputFile], text_field: str, txt_document: TxtDocument) -> CorpusStatistics:
    """Read the beginnings of up to `MAX_FILES` files, in about a second."""
    ends = list(accumulate(file.bytes for file in files))
    total = ends[-1]
    positions = ((2 * i + 1) * total // (2 * MAX_FILES) for i in range(MAX_FILES))
    picked = Counter(min(bisect_right(ends, position), len(files) - 1) for position in positions)
    passages: list[str] = []
    text_share = 0.0  # of the bytes on disk
    for number, times in sorted(picked.items()):
        file, num_bytes, text_bytes = files[number], 0, 0.0
        # A .txt that is one document is read by lines: it may be of any size.
        for item in read(Range(file), text_field, "line" if file.format == "txt" else txt_document):
            if num_bytes >= times * HEAD_BYTES // MAX_FILES:
                # The text in the whole file, if the rest is like its beginning.
                text_bytes = num_bytes * total_plain_bytes([file]) / max(1, bytes_before(item))
                break
            if isinstance(item, Document):
                passages += passages_of(item.text)
                num_bytes += len(item.text.encode())
        text_share += times / MAX_FILES * (text_bytes or num_bytes) / max(1, file.bytes)
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


def _distinct_words(passages: Sequence[str]) -> DistinctWords:
    words = {word for passage in passages for word in _WORD.findall(passage)}
    codes = np.frombuffer("\n".join(words).encode("utf-32-le"), dtype=np.uint32).astype(np.int64)
    pairs = np.unique((codes[:-1] << 21 | codes[1:])[(codes[:-1] != ord("\n")) & (codes[1:] != ord("\n"))])
    return np.array(
        [len(words), len(codes) - max(0, len(words) - 1), len(pairs), sum(len(word.encode()) for word in words)],
        dtype=np.float64,
    )
