"""How much text to train a tokenizer on, and how much memory that takes, before it starts.

In: the settings and the files. Out: a `Plan`. What the trainer's process holds at its peak (sentencepiece 0.2.3) was
measured on 14 bodies of text, 5 to 60 MB of Japanese, Korean and European languages; from that come the factors:
- unigram, while it looks for candidates: the text, where a space is three bytes (U+2581), three arrays of 4 bytes for
  each of these (suffixes, common prefixes and their inverse), and something for each line. Within 3 %.
- bpe, while it counts pairs: each different word, as characters with their places. A word of a language without spaces
  is most of a line. Within 15 %, where the words are known (text of random words without spaces takes up to 70 %
  more); or, where lines are many and short (as with `pre_segment`), while it reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zerokara.config import TokenizerConfig
from zerokara.corpus.inputs import InputFile
from zerokara.errors import UserError
from zerokara.progress import bytes_text
from zerokara.resources import available_memory
from zerokara.tokenizer.corpus_statistics import Outlook, look
from zerokara.tokenizer.sampling import PASSAGE_OVERHEAD_BYTES

BASE_BYTES = 22_000_000
"""The process of a training without any text: Python and SentencePiece."""
AUTO_SHARE = 0.5
"""Of the free memory, what `auto` may use."""
AUTO_MOST_BYTES = 200_000_000
"""More text than this hardly changes a vocabulary, and costs minutes a hundred megabytes."""
AUTO_LEAST_BYTES = 10_000_000
_CHUNK_BYTES = 500_000_000
"""The unigram trainer looks for candidates in so much text at a time (`kMaxChunkBytes`)."""
_MORPHEMES_PER_BYTE = 0.22
"""Of Japanese; Korean has 0.20."""


@dataclass(frozen=True)
class Plan:
    """The budget of the sample and the memory that it will take."""

    sample_bytes: int
    peak_bytes: int
    """Of the process that trains."""
    sampling_bytes: int
    """Of the sampling before it, which is over by then."""
    available_bytes: int


def plan(config: TokenizerConfig, files: Sequence[InputFile]) -> Plan:
    """Settle `sample_bytes: auto` and estimate the peak memory; looks at the beginnings of the files."""
    outlook = look(files, config.text_field, config.txt_document)
    available = available_memory()
    if config.sample_bytes == "auto":
        budget = max(AUTO_LEAST_BYTES, min(AUTO_MOST_BYTES, _largest(config, outlook, int(AUTO_SHARE * available))))
    else:
        budget = config.sample_bytes
    sample = min(budget, outlook.offered_bytes)
    return Plan(budget, _trainer(config, outlook, sample), _sampling(outlook, sample), available)


def check(config: TokenizerConfig, files: Sequence[InputFile], made: Plan) -> None:
    """Refuse a plan that the machine has no memory for.

    Raises: UserError with the largest sample that fits.
    """
    needed = max(made.peak_bytes, made.sampling_bytes)
    if needed > made.available_bytes:
        fits = _largest(config, look(files, config.text_field, config.txt_document), int(0.8 * made.available_bytes))
        rule = f"needs about {bytes_text(needed)} of memory, and {bytes_text(made.available_bytes)} are free"
        raise UserError(config.fault("sample_bytes", rule, f"set {fits} or less, or auto"))


def _trainer(config: TokenizerConfig, outlook: Outlook, sample_bytes: float) -> int:
    """Peak memory of a training on so much text."""
    share = sample_bytes / max(1, outlook.bytes)
    lines = share * outlook.lines
    if config.pre_segment != "none":
        lines += _MORPHEMES_PER_BYTE * sample_bytes
    text = sample_bytes + 2 * share * outlook.spaces + lines
    if config.model_type == "unigram":
        return round(BASE_BYTES + 14 * min(text, _CHUNK_BYTES) + 1.6 * text + 31 * lines)
    reading = 4.5 * text + 40 * lines
    if config.pre_segment != "none":
        return round(BASE_BYTES + reading)
    words = outlook.words_in(sample_bytes)
    # Pairs of characters and their places, one fewer in a word than it has characters; merges add to them. Measured for
    # 6,000 to 64,000 pieces.
    doublings = min(2.0, max(-2.5, math.log2(config.vocab_size / 32_000)))
    merging = (69 + 16 * doublings) * words.characters - (132 + 99 * doublings) * words.count + 789 * words.pairs
    return round(BASE_BYTES + max(reading, merging))


def _sampling(outlook: Outlook, sample_bytes: float) -> int:
    return round(sample_bytes + PASSAGE_OVERHEAD_BYTES * outlook.passages * sample_bytes / max(1, outlook.bytes))


def _largest(config: TokenizerConfig, outlook: Outlook, memory_bytes: int) -> int:
    """The largest sample that so much memory is enough for, within a hundredth."""
    low, high = 0, max(1, memory_bytes)
    while high - low > 1 + low // 100:
        middle = (low + high) // 2
        fits = max(_trainer(config, outlook, middle), _sampling(outlook, middle)) <= memory_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low // 10_000 * 10_000
