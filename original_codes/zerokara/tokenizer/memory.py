"""How much text to train a tokenizer on, and how much memory that takes, before it starts.

In: the settings and the files. Out: a `SampleBudget`. The peak memory of the trainer's process (sentencepiece 0.2.3)
was measured on 14 bodies of text, 5 to 60 MB of Japanese, Korean and European languages, which gave the factors:
- unigram, while it looks for candidates: the text, where a space is three bytes (U+2581), three arrays of 4 bytes for
  each of these bytes (suffixes, common prefixes and their inverse), and a constant for each line. Within 3 %.
- bpe, while it counts pairs: each distinct word, as characters with their positions. In a language without spaces most
  of a line is one word. Within 15 % where the words are known (random words without spaces take up to 70 % more); or,
  where lines are many and short (as with `pre_segment`), while it reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.corpus.inputs import InputFile
from zerokara.errors import UserError
from zerokara.progress import bytes_text
from zerokara.resources import available_memory
from zerokara.tokenizer.corpus_statistics import CorpusStatistics, statistics_of
from zerokara.tokenizer.sampling import PASSAGE_OVERHEAD_BYTES

BASE_BYTES = 22_000_000
"""The training process without any text: Python and SentencePiece."""
AUTO_SHARE = 0.5
"""Share of the free memory that `auto` may use."""
SAFE_SHARE = 0.8
"""Share of the free memory that a sample may need which an error recommends."""
AUTO_MOST_BYTES = 200_000_000
"""More text than this hardly changes a vocabulary, and takes minutes per hundred megabytes."""
AUTO_LEAST_BYTES = 10_000_000
_CHUNK_BYTES = 500_000_000
"""The unigram trainer looks for candidates in this much text at a time (`kMaxChunkBytes`)."""
_MORPHEMES_PER_BYTE = 0.22
"""Of Japanese; Korean has 0.20."""


@dataclass(frozen=True)
class SampleBudget:
    """The size of the sample and the memory that it takes."""

    sample_bytes: int
    peak_bytes: int
    """Of the training process."""
    sampling_bytes: int
    """Of the sampling before it, which is over by then."""
    available_bytes: int
    largest_bytes: int
    """The largest sample that safely fits the available memory."""


def budget(config: TokenizerConfig, files: Sequence[InputFile]) -> SampleBudget:
    """Resolve `sample_bytes: auto` and estimate the peak memory, from the beginnings of the files."""
    statistics = statistics_of(files, config.text_field, config.txt_document)
    available = available_memory()
    if config.sample_bytes == "auto":
        fits = _largest(config, statistics, int(AUTO_SHARE * available))
        sample_bytes = max(AUTO_LEAST_BYTES, min(AUTO_MOST_BYTES, fits))
    else:
        sample_bytes = config.sample_bytes
    drawn = min(sample_bytes, statistics.offered_bytes)
    return SampleBudget(
        sample_bytes=sample_bytes,
        peak_bytes=_training_bytes(config, statistics, drawn),
        sampling_bytes=_sampling_bytes(statistics, drawn),
        available_bytes=available,
        largest_bytes=_largest(config, statistics, int(SAFE_SHARE * available)),
    )


def check(config: TokenizerConfig, budget: SampleBudget) -> None:
    """Refuse a sample that the machine has no memory for.

    Raises:
        UserError: with the largest sample that fits.
    """
    needed = max(budget.peak_bytes, budget.sampling_bytes)
    if needed > budget.available_bytes:
        rule = f"needs about {bytes_text(needed)} of memory, and {bytes_text(budget.available_bytes)} are free"
        raise UserError(config.fault("sample_bytes", rule, f"set {budget.largest_bytes} or less, or auto"))


def _training_bytes(config: TokenizerConfig, statistics: CorpusStatistics, sample_bytes: float) -> int:
    """Peak memory of a training on so much text."""
    share = sample_bytes / max(1, statistics.bytes)
    lines = share * statistics.lines
    if config.pre_segment != "none":
        lines += _MORPHEMES_PER_BYTE * sample_bytes
    text = sample_bytes + 2 * share * statistics.spaces + lines
    if config.model_type == "unigram":
        return round(BASE_BYTES + 14 * min(text, _CHUNK_BYTES) + 1.6 * text + 31 * lines)
    reading = 4.5 * text + 40 * lines
    if config.pre_segment != "none":
        return round(BASE_BYTES + reading)
    words = statistics.words_in(sample_bytes)
    # Pairs of characters and their positions, one fewer in a word than it has characters; merges add to them. Measured
    # for 6,000 to 64,000 pieces.
    doublings = min(2.0, max(-2.5, math.log2(config.vocab_size / 32_000)))
    merging = (69 + 16 * doublings) * words.characters - (132 + 99 * doublings) * words.count + 789 * words.pairs
    return round(BASE_BYTES + max(reading, merging))


def _sampling_bytes(statistics: CorpusStatistics, sample_bytes: float) -> int:
    return round(sample_bytes + PASSAGE_OVERHEAD_BYTES * statistics.passages * sample_bytes / max(1, statistics.bytes))


def _largest(config: TokenizerConfig, statistics: CorpusStatistics, memory_bytes: int) -> int:
    """The largest sample that fits so much memory, within 1 %."""
    low, high = 0, max(1, memory_bytes)
    while high - low > 1 + low // 100:
        middle = (low + high) // 2
        fits = max(_training_bytes(config, statistics, middle), _sampling_bytes(statistics, middle)) <= memory_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low // 10_000 * 10_000
