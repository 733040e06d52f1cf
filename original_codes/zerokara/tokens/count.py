"""What the token files hold.

Tokens and documents of both splits come from the headers of the files: a terabyte takes no longer than a page. The
frequencies of the tokens give the unigram-entropy baseline: the loss of a model that knows only these.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara import manifest
from zerokara.errors import Fault, UserError
from zerokara.tokens.indexed import IndexedTokens, read_header
from zerokara.tokens.layout import TokenPaths, bin_path, idx_path

SAMPLE_TOKENS = 50_000_000
"""Tokens whose frequencies are counted at most: a second's work, and far more than the estimate needs."""


@dataclass(frozen=True)
class SplitCount:
    """One split."""

    documents: int
    tokens: int
    """Including the end-of-document ids."""
    bytes: int
    """Size of the .bin."""

    @property
    def mean_tokens(self) -> float:
        """Mean tokens per document."""
        return self.tokens / self.documents if self.documents else 0.0


@dataclass(frozen=True)
class Counts:
    """Both splits; `valid` is None where nothing was held out for validation."""

    train: SplitCount
    valid: SplitCount | None


def count(output_prefix: str) -> Counts:
    """Count from the headers.

    Raises:
        UserError: the training split is missing, or a file is damaged.
    """
    paths = TokenPaths(output_prefix)
    has_valid = idx_path(paths.valid).exists() or bin_path(paths.valid).exists()
    return Counts(_count_split(paths.train), _count_split(paths.valid) if has_valid else None)


def check_belongs(output_prefix: str, tokenizer_sha256: str) -> manifest.Manifest:
    """Check that the token files were made with this tokenizer; return their manifest.

    Raises:
        UserError: they were made with another, or step 2 has not finished.
    """
    paths = TokenPaths(output_prefix)
    made = manifest.read(paths.manifest)
    found = made.facts.get("tokenizer_sha256")
    if found != tokenizer_sha256:
        raise UserError(
            Fault(
                where=str(bin_path(paths.train)),
                rule=f"was made with another tokenizer: its sha256 is {found}, that of input_tokenizer_file is "
                f"{tokenizer_sha256}",
                remedy="name the tokenizer it was made with, or tokenise again: step 2 with --redo",
            )
        )
    return made


def _count_split(prefix: Path) -> SplitCount:
    header = read_header(prefix)
    size = bin_path(prefix).stat().st_size
    return SplitCount(header.num_documents, size // header.id_bytes, size)


def token_counts(tokens: IndexedTokens) -> NDArray[np.int64]:
    """Occurrences of each id, [largest id + 1]."""
    return np.bincount(tokens.tokens[:SAMPLE_TOKENS])


def entropy(counts: NDArray[Any]) -> float:
    """Entropy of a distribution, in nats; `counts` are in proportion to its probabilities, and may be 0."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
