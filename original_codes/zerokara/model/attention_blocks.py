"""How `blocked_attention` cuts attention into blocks, and what it keeps; without torch, for the memory forecast."""

from __future__ import annotations

BLOCK = 256
"""Queries in a block where attention is causal."""
MAX_SCORES = 1 << 23
"""Scores that are held at a time, of at least one key head of one sample; 16 MB."""
MAX_KEPT = 1 << 23
"""Probabilities that a layer keeps for its backward pass; where there are more, they are computed again."""


def query_blocks(queries: int, keys: int, is_causal: bool) -> list[tuple[int, int, int]]:
    """First query of each block, its end, and the number of keys that these queries may see."""
    width = BLOCK if is_causal else queries
    ends = [(start, min(start + width, queries)) for start in range(0, queries, width)]
    return [(start, end, end if is_causal else keys) for start, end in ends]


def keeps_probabilities(heads: int, queries: int, keys: int) -> bool:
    """Whether they are kept; `heads` are those of all samples."""
    return heads * queries * keys <= MAX_KEPT


def kept_probabilities(heads: int, queries: int, keys: int, is_causal: bool) -> int:
    """Numbers that a layer keeps."""
    if not keeps_probabilities(heads, queries, keys):
        return 0
    return heads * sum((end - start) * seen for start, end, seen in query_blocks(queries, keys, is_causal))
