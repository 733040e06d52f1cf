"""The loss of a model that knows how often each token occurs and nothing else: the mark that training must pass."""

from __future__ import annotations

import numpy as np

from zerokara.tokens.indexed import IndexedTokens

SAMPLE_TOKENS = 50_000_000
"""Counting stops here: a second's work, and far more than the estimate needs."""


def unigram_entropy(tokens: IndexedTokens) -> float:
    """Entropy of the token frequencies, in nats a token."""
    counts = np.bincount(tokens.tokens[:SAMPLE_TOKENS])
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
