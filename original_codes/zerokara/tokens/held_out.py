"""Which documents are held out for validation: a draw from each source, or all of a held-out text.

Validation takes whole documents: `valid_jsonl`, or a draw from each source. Of a source's n documents the k =
max(valid_min_documents, round(valid_fraction · n)) with the smallest key are held out; the key of document i is a
bijective hash of i seeded by (split_seed, source), so the draw is a pure function of these, has no ties, and needs no
list: one comparison with a threshold decides the split of a document.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from zerokara.base.errors import UserError
from zerokara.base.progress import Progress, plural
from zerokara.config.data import DataSettings
from zerokara.tokens.indexed import IndexedTokens

_KEYS_AT_ONCE, _COMPARED_AT_ONCE = 1 << 20, 1 << 12  # documents


def num_valid_documents(config: DataSettings, source: int, num_documents: int) -> int:
    """Number of a source's validation documents: all of held-out text, 0 where none are drawn.

    Raises UserError if it has no documents, or less than half would be for training.
    """
    key, name = config.entries[source]
    if num_documents == 0:
        raise UserError(config.fault(key, f"the source {name} holds no document with text"))
    if config.valid_jsonl or config.valid_fraction == 0:
        return num_documents if key == "valid_jsonl" else 0
    num_valid = max(config.valid_min_documents, min(round(config.valid_fraction * num_documents), num_documents // 2))
    if num_documents < 2 * num_valid:
        rule = f"the source {name} has {plural(num_documents, 'document')}, too few to hold out {num_valid:,} of them"
        half = f"set it to {num_documents // 2} or less, or " if num_documents > 1 else "set "
        remedy = f"{half}valid_fraction to 0, or cut the text into more documents (txt_document: line)"
        raise UserError(config.fault("valid_min_documents", rule, remedy))
    return num_valid


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), a bijection of
    64 bits, of each value; numpy's uint64 arrays wrap round."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def document_keys(first: int, count: int, split_seed: int, source: int) -> NDArray[np.uint64]:
    """uint64[count]: keys of documents `first` … `first + count - 1` of the source."""
    seed = hashlib.sha256(f"{split_seed}/{source}".encode()).digest()[:8]
    return splitmix64(np.arange(first, first + count, dtype=np.uint64) + np.frombuffer(seed, "<u8"))


def num_copies(train: IndexedTokens, valid: IndexedTokens) -> int:
    """Number of validation documents that the training text has as well, id for id."""

    def keys(tokens: IndexedTokens, first: int) -> NDArray[np.int64]:
        """int64[≤ _COMPARED_AT_ONCE]: of each document its length and the id in its middle, which few others share."""
        lengths = tokens.lengths[first : first + _COMPARED_AT_ONCE].astype(np.int64)
        places = tokens.pointers[first : first + _COMPARED_AT_ONCE] // tokens.dtype.itemsize + lengths // 2
        return lengths << 32 | tokens.tokens[places].astype(np.int64)

    of_valid = (keys(valid, first) for first in range(0, len(valid), _COMPARED_AT_ONCE))
    wanted = np.unique(np.concatenate([[-1], *of_valid]))
    trained = set[bytes]()
    with Progress("looking for copies", len(train), "document") as progress:
        for first in range(0, len(train), _COMPARED_AT_ONCE):
            part = IndexedTokens(train.prefix)  # opened anew: what was read before need not stay in memory
            found = keys(part, first)
            alike = np.flatnonzero(wanted.take(np.searchsorted(wanted, found), mode="clip") == found) + first
            trained.update(xxh3_128_digest(part[number].tobytes()) for number in alike.tolist())
            progress.advance(len(found))
    return sum(xxh3_128_digest(valid[number].tobytes()) in trained for number in range(len(valid)))


def valid_threshold(num_documents: int, num_valid: int, split_seed: int, source: int) -> int | None:
    """The largest key of a validation document, None if there is none; memory grows with `num_valid` only."""
    if num_valid == 0:
        return None
    smallest, step = np.empty(0, dtype=np.uint64), max(_KEYS_AT_ONCE, num_valid)
    for first in range(0, num_documents, step):
        keys = document_keys(first, min(step, num_documents - first), split_seed, source)
        smallest = np.concatenate([smallest, keys])
        if len(smallest) > num_valid:
            smallest = np.partition(smallest, num_valid - 1)[:num_valid]
    return int(smallest.max())
