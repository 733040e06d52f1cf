"""How much text to train a tokenizer on, and how much memory that takes, before it starts.

In: the settings and the files. Out: a `Plan`. The factors are measured (sentencepiece 0.2.3, 2 to 12 MB of Japanese and
English): unigram held 15 to 21 bytes a byte of text at its peak (the suffix array), BPE 27 on Japanese, where a whole
sentence is one word to it, and 7 on English.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from zerokara.config import TokenizerConfig
from zerokara.corpus.inputs import InputFile
from zerokara.errors import UserError
from zerokara.progress import bytes_text

PEAK_BYTES_PER_BYTE = {"unigram": 22, "bpe": 30}
BASE_BYTES = 100_000_000
AUTO_SHARE = 0.5
"""Of the free memory, what `auto` may use."""
AUTO_MOST_BYTES = 200_000_000
"""More text than this hardly changes a vocabulary, and costs minutes a hundred megabytes."""
AUTO_LEAST_BYTES = 10_000_000
GZIP_FACTOR = 4
"""Text in a byte of gzip, roughly."""
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Plan:
    """The budget of the sample and the memory that it will take."""

    sample_bytes: int
    peak_bytes: int
    available_bytes: int


def plan(config: TokenizerConfig, files: Sequence[InputFile]) -> Plan:
    """Settle `sample_bytes: auto` and estimate the peak memory."""
    factor = PEAK_BYTES_PER_BYTE[config.model_type]
    available = available_bytes()
    if config.sample_bytes == "auto":
        fits = int(AUTO_SHARE * available) // factor
        budget = max(AUTO_LEAST_BYTES, min(AUTO_MOST_BYTES, fits))
    else:
        budget = config.sample_bytes
    offered = sum(file.bytes * (GZIP_FACTOR if file.gzipped else 1) for file in files)
    return Plan(budget, BASE_BYTES + factor * min(budget, offered), available)


def check(config: TokenizerConfig, made: Plan) -> None:
    """Refuse a plan that the machine has no memory for.

    Raises: UserError with the largest sample that fits.
    """
    if made.peak_bytes > made.available_bytes:
        fits = max(0, made.available_bytes - BASE_BYTES) // PEAK_BYTES_PER_BYTE[config.model_type]
        rule = f"needs about {bytes_text(made.peak_bytes)} of memory, and {bytes_text(made.available_bytes)} are free"
        raise UserError(config.fault("sample_bytes", rule, f"set {int(0.8 * fits)} or less, or auto"))


def available_bytes() -> int:
    """Memory that this process may still take: of the machine, or of the container's limit if that is less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file in _CGROUP_FILES:
        try:
            limit = Path(limit_file).read_text(encoding="ascii").strip()
            used = int(Path(used_file).read_text(encoding="ascii"))
        except OSError:
            continue
        if limit != "max":
            available = min(available, max(0, int(limit) - used))
    return available
