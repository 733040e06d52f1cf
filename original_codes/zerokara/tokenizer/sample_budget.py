"""Size of the training sample, and the memory that a tokenizer's training takes at most, before it starts.

SentencePiece 0.2.3 takes most where it looks for candidates (unigram: arrays over the bytes of the text) or counts
pairs (bpe: the distinct words, of which a language without spaces has most). `PEAK_BYTES` is above the highest peak
measured on 14 bodies of text, 5 to 60 MB of Japanese, Korean and European languages; bpe on a language with spaces
takes a quarter of it. With `base_tokenizer` (tokenizers 0.23, 10 and 20 MB of Japanese and Romanian) the base itself,
of 150,000 pieces, comes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.corpus.find import InputFile
from zerokara.corpus.read import total_plain_bytes
from zerokara.errors import UserError
from zerokara.progress import bytes_text
from zerokara.resources import available_memory

PROCESS_BYTES, BASE_TOKENIZER_BYTES = 40_000_000, 750_000_000
"""Memory of the training process without any text, and with a `base_tokenizer`."""
PEAK_BYTES = {"unigram": 24, "unigram of morphemes": 34, "bpe": 50, "bpe of morphemes": 18, "base": 100, "extend": 45}
"""Bytes of memory for each byte of text, at most."""
AUTO_SHARE, SAFE_SHARE = 0.5, 0.8
"""Shares of the free memory that `auto` may use, and that a sample may need which an error recommends."""
AUTO_LEAST_BYTES, AUTO_MOST_BYTES, AUTO_MOST_BYTES_BASE = 10_000_000, 200_000_000, 50_000_000
"""More text than this hardly changes a vocabulary, and takes minutes per hundred megabytes; per ten with
`base_tokenizer` where words are not separated by spaces."""


@dataclass(frozen=True)
class SampleBudget:
    """Most bytes of the sample, most memory that its training takes, and the largest sample that safely fits."""

    sample_bytes: int
    peak_bytes: int
    available_bytes: int
    largest_bytes: int


def estimate(config: TokenizerConfig, files: Sequence[InputFile]) -> SampleBudget:
    """Resolve `sample_bytes: auto`, and bound the memory."""
    available, kind, fixed = available_memory(), str(config.model_type), PROCESS_BYTES
    if config.base_tokenizer:
        kind, fixed = "extend" if config.extend else "base", BASE_TOKENIZER_BYTES
    elif config.pre_segment != "none":
        kind += " of morphemes"

    def largest(share: float) -> int:
        return max(0, int(share * available) - fixed) // PEAK_BYTES[kind]

    most = AUTO_MOST_BYTES_BASE if config.base_tokenizer else AUTO_MOST_BYTES
    auto_bytes = max(AUTO_LEAST_BYTES, min(most, largest(AUTO_SHARE)))
    sample_bytes = auto_bytes if config.sample_bytes == "auto" else config.sample_bytes
    peak_bytes = fixed + PEAK_BYTES[kind] * min(sample_bytes, total_plain_bytes(files))
    return SampleBudget(sample_bytes, peak_bytes, available, largest(SAFE_SHARE))


def check(config: TokenizerConfig, budget: SampleBudget) -> None:
    """Raise a `UserError`, with the largest sample that fits, where the machine may lack the memory."""
    if budget.peak_bytes > budget.available_bytes:
        rule = f"may need {bytes_text(budget.peak_bytes)} of memory, and {bytes_text(budget.available_bytes)} are free"
        raise UserError(config.fault("sample_bytes", rule, f"set {budget.largest_bytes} or less, or auto"))
