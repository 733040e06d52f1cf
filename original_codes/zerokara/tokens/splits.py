"""Which documents of a source are held out for validation: whole documents, drawn from the entire source.

Of a source's n documents the k = max(valid_min_documents, round(valid_fraction · n)) with the smallest key are kept;
the key of document i is a bijective hash of i seeded by (split_seed, source), so the draw is a pure function of these,
has no ties, and needs no list: one comparison with a threshold decides the split of a document.
The hash is the finalizer of SplitMix64 (Steele, Lea, Flood 2014), every step of which is invertible.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from zerokara.config.data import DataSettings
from zerokara.errors import UserError

_CHUNK = 1 << 20


def num_valid_documents(config: DataSettings, name: str, num_documents: int) -> int:
    """Number of a source's validation documents; 0 when `valid_fraction` is 0.

    Raises:
        UserError: it has no documents, or less than half would be for training.
    """
    if num_documents == 0:
        raise UserError(config.fault("input_jsonl", f"the source {name} holds no document with text"))
    if config.valid_fraction == 0:
        return 0
    num_valid = max(config.valid_min_documents, round(config.valid_fraction * num_documents))
    if num_documents < 2 * num_valid:
        rule = f"the source {name} has {num_documents:,} documents, too few to hold out {num_valid:,} for validation"
        remedy = f"set it to {num_documents // 2} or less, or valid_fraction to 0, or cut the text into more documents"
        raise UserError(config.fault("valid_min_documents", rule, remedy))
    return num_valid


def document_keys(first: int, count: int, split_seed: int, source: int) -> NDArray[np.uint64]:
    """uint64[count]: keys of documents `first` … `first + count - 1` of the source."""
    seed = hashlib.sha256(f"{split_seed}/{source}".encode()).digest()[:8]
    x = np.arange(first, first + count, dtype=np.uint64)
    x += np.frombuffer(seed, "<u8")
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def valid_threshold(num_documents: int, num_valid: int, split_seed: int, source: int) -> np.uint64 | None:
    """The largest key of a validation document, None if there is none; memory grows with `num_valid` only."""
    if num_valid == 0:
        return None
    smallest = np.empty(0, dtype=np.uint64)
    for first in range(0, num_documents, _CHUNK):
        keys = document_keys(first, min(_CHUNK, num_documents - first), split_seed, source)
        smallest = np.concatenate([smallest, keys])
        if len(smallest) > num_valid:
            smallest = np.partition(smallest, num_valid - 1)[:num_valid]
    return np.uint64(smallest.max())


def is_valid(first: int, count: int, threshold: np.uint64 | None, split_seed: int, source: int) -> NDArray[np.bool_]:
    """bool[count]: whether each of documents `first` … `first + count - 1` is a validation document."""
    if threshold is None:
        return np.zeros(count, dtype=np.bool_)
    return document_keys(first, count, split_seed, source) <= threshold
