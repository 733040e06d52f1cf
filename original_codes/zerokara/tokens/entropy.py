"""Token frequencies and their entropy: the unigram-entropy baseline, the loss of a model that knows only these."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara.tokens.indexed import IndexedTokens

SAMPLE_TOKENS = 50_000_000
"""Tokens that are counted at most: a second's work, and far more than the estimate needs."""


def token_counts(tokens: IndexedTokens) -> NDArray[np.int64]:
    """Occurrences of each id, [largest id + 1]."""
    return np.bincount(tokens.tokens[:SAMPLE_TOKENS])


def entropy(counts: NDArray[Any]) -> float:
    """Entropy of a distribution, in nats; `counts` are in proportion to its probabilities, and may be 0."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
