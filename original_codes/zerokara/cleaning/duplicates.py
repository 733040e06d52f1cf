"""Stages 2 to 5: which documents are copies of an earlier one, which lines many of the others have, and the clean text.

Keys are compared in parts, each a range of all possible keys, so that a part needs memory for its share alone. Its
records come from every task, which saved them in the order of their keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara.cleaning import plan as work
from zerokara.cleaning.plan import RANK, Plan, Shards, save, saved
from zerokara.cleaning.survey import NUM_VALUES
from zerokara.corpus.token_hashes import Hashes, tokens_of

Ids = NDArray[np.uint64]
_LEAST_SHOWN = 20
"""Documents with a line that the report shows, where the rule is off."""
_CHUNK = 1 << 16
_ROW = np.uint64((1 << RANK) - 1)


def _records(folder: Path, table: str, part: int, num_parts: int) -> Iterator[tuple[Hashes, Ids]]:
    """For each row of a table, the keys of a part in their order, and the documents; of one key these are in order."""
    first, last = (np.uint64(min(each * (1 << 64) // num_parts, (1 << 64) - 1)) for each in (part, part + 1))
    names = [path.stem for path in sorted(folder.glob(f"{table}_keys-*.npy"))]
    ranks = [int(name.rpartition("-")[2]) for name in names]
    for row in range(len(saved(folder, f"{table}_keys", ranks[0])) if ranks else 0):
        found = [(np.zeros(0, np.uint64), np.zeros(0, np.uint64))]
        for rank in ranks:
            keys = saved(folder, f"{table}_keys", rank)[row]
            start, end = np.searchsorted(keys, np.array([first, last]))
            own = slice(start, end if part + 1 < num_parts else None)  # copied: each open array holds a file
            rows = saved(folder, f"{table}_rows", rank)[row, own]
            found.append((np.array(keys[own]), rows.astype(np.uint64) | np.uint64(rank << RANK)))
        keys, ids = (np.concatenate(each) for each in zip(*found, strict=True))
        order = np.argsort(keys, kind="stable")
        yield keys[order], ids[order]


def _firsts(keys: Hashes, ids: Ids) -> Ids:
    """For each record the first document with its key."""
    is_first = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
    return ids[is_first][np.cumsum(is_first) - 1]


def pairs(plan: Plan, folder: Path, part: int, num_parts: int) -> None:
    """Save a part of the equal documents, `exact`, and of the similar ones, `near`: a later and an earlier one each."""
    for keys, ids in _records(folder, "exact", part, num_parts):
        firsts = _firsts(keys, ids)
        save(folder, "exact", part, np.stack([ids, firsts], axis=1)[ids != firsts])
    found = [np.zeros((0, 2), np.uint64)]
    for keys, ids in _records(folder, "bands", part, num_parts):
        same = np.flatnonzero(keys[1:] == keys[:-1]) + 1  # each with the first of its band, and with the one before it
        found += [np.stack([ids[same], each[same]], axis=1) for each in (_firsts(keys, ids), np.roll(ids, 1))]
    candidates = np.unique(np.concatenate(found), axis=0)
    chunks = (candidates[start : start + _CHUNK] for start in range(0, len(candidates), _CHUNK))
    values = np.concatenate([np.zeros(0), *(similarity(folder, *chunk.T) for chunk in chunks)])
    save(folder, "near", part, candidates[values >= least_similarity(plan.config.near_duplicates)])


def least_similarity(threshold: float) -> float:
    """The least estimate that is taken: 1.5 standard errors below the threshold, so that few pairs at it are missed."""
    return threshold - 1.5 * float(np.sqrt(threshold * (1 - threshold) / NUM_VALUES))


def similarity(folder: Path, ids: Ids, others: Ids) -> NDArray[np.float64]:
    """Estimate the Jaccard similarity of pairs of documents. Of unequal values, one byte in 256 is equal."""
    sides = []
    for side in (ids, others):
        ranks, rows = side >> np.uint64(RANK), side & _ROW
        sides.append(np.empty((len(side), NUM_VALUES), np.uint8))
        for rank in np.unique(ranks).tolist():
            sides[-1][ranks == rank] = saved(folder, "signatures", rank)[rows[ranks == rank]]
    return ((sides[0] == sides[1]).mean(axis=1) - 1 / 256) / (1 - 1 / 256)


def choose(plan: Plan, folder: Path, rank: int, num_tasks: int) -> None:
    """Save the `copies` that are dropped, in columns: document, the one that stays, 1 if it equals an earlier one.

    The copy of a copy is compared with the document that stays, so that no chain of small changes drops what is unlike
    all that stays.
    """
    config = plan.config
    originals: dict[int, int] = dict(joined(folder, "exact", 2).tolist()) if config.exact_duplicates else {}
    equal, least = {*originals}, least_similarity(config.near_duplicates)
    for copy, earlier in np.unique(joined(folder, "near", 2), axis=0).tolist():
        first = originals.get(earlier, earlier)
        pair = np.array([[copy], [first]], np.uint64)
        if copy not in originals and (first == earlier or similarity(folder, *pair)[0] >= least):
            originals[copy] = first
    rows = [(copy, originals.get(first, first), copy in equal) for copy, first in sorted(originals.items())]
    save(folder, "copies", 0, np.array(rows, np.uint64).reshape(-1, 3).T.copy())


def lines(plan: Plan, folder: Path, part: int, num_parts: int) -> None:
    """Save a part of the `repeated` lines of the documents that stay (key, number of documents, the first of them), and
    the documents with one, `with_lines`."""
    for keys, ids in _records(folder, "lines", part, num_parts):
        copies = saved(folder, "copies", 0)[0]
        places = np.minimum(np.searchsorted(copies, ids), max(0, len(copies) - 1))
        stays = copies[places] != ids if len(copies) else np.ones(len(ids), np.bool_)
        found, starts, counts = np.unique(keys[stays], return_index=True, return_counts=True)
        many = counts >= (plan.config.repeated_lines or _LEAST_SHOWN)
        rows = np.stack([found, counts.astype(np.uint64), ids[stays][starts]], axis=1)
        save(folder, "repeated", part, rows[many])
        save(folder, "with_lines", part, np.unique(ids[stays][np.repeat(many, counts)]))


def joined(folder: Path, name: str, num_columns: int) -> NDArray[np.uint64]:
    """The rows of all parts."""
    parts = [np.load(path) for path in sorted(folder.glob(f"{name}-*.npy"))]
    return np.concatenate([np.zeros((0, num_columns), np.uint64), *parts])


class _Places:
    """The files and the lines of documents, by what the first stage has counted in the ranges of each file."""

    def __init__(self, plan: Plan, folder: Path):
        self._folder, self._tasks, counted = folder, plan.tasks, Counter[str]()
        self._before: list[list[int]] = []
        for task, facts in zip(self._tasks, work.saved_facts(folder, "survey", len(plan.tasks)), strict=True):
            self._before.append([])
            for part, last_line in zip(task, facts["last_lines"], strict=True):
                self._before[-1].append(counted[part.file.name])
                counted[part.file.name] += last_line

    def place(self, rank: int, part: int, line: int) -> dict[str, Any]:
        """The place of a line of a range."""
        return {"source": self._tasks[rank][part].file.name, "line": self._before[rank][part] + line}

    def of(self, document: int) -> dict[str, Any]:
        """The place of a document."""
        rank, row = divmod(document, 1 << RANK)
        return self.place(rank, *map(int, saved(self._folder, "places", rank)[row]))


def write(plan: Plan, folder: Path, rank: int, num_tasks: int) -> None:
    """Write the clean text of a task and what each rule dropped, with their places in the corpus."""
    config, places = plan.config, _Places(plan, folder)
    repeated, copies = joined(folder, "repeated", 3), saved(folder, "copies", 0)
    own = np.array([rank << RANK, rank + 1 << RANK], np.uint64)
    own_copies = copies[:, slice(*np.searchsorted(copies[0], own))].T.tolist()
    originals = {copy: (original, is_equal) for copy, original, is_equal in own_copies}
    with_lines = set[int]()
    for path in folder.glob("with_lines-*.npy") if config.repeated_lines else ():
        documents = np.load(path, mmap_mode="r")
        with_lines.update(documents[slice(*np.searchsorted(documents, own))].tolist())
    with Shards(folder, rank, 3) as shards:
        for rule in (work.UNREADABLE, *config.document_rules):
            for record in work.records(folder, rule, rank):
                place = places.place(rank, record.pop("part"), record.pop("line"))
                shards.put(work.DROPPED + rule, **record | place)
        for document, record in enumerate(work.records(folder, work.KEPT, rank), rank << RANK):
            text, place = record["text"], places.place(rank, record["part"], record["line"])
            if document in originals:
                original, is_equal = originals[document]
                rule = work.EXACT if is_equal else work.NEAR
                shards.put(work.DROPPED + rule, text, **place, copy_of=places.of(original))
                continue
            if document in with_lines:
                of_text, keys = text.split("\n"), tokens_of([text]).line_hashes()
                known = repeated[np.minimum(np.searchsorted(repeated[:, 0], keys), len(repeated) - 1)]
                start, end = without_edges(of_text, (known[:, 0] == keys) & (known[:, 2] != document))
                if (start, end) != (0, len(of_text)):
                    shards.put(work.DROPPED + work.LINES, "\n".join([*of_text[:start], *of_text[end:]]), **place)
                    text = "\n".join(of_text[start:end])
            if text:
                shards.put(work.CLEAN, text, **place)
    work.save_facts(folder, "write", rank, shards.tallies)


def without_edges(texts: Sequence[str], is_removable: NDArray[np.bool_]) -> tuple[int, int]:
    """Where lines begin and end without the removable ones at their edges, and the empty ones beside those."""
    start, end = 0, len(texts)
    while start < end and (is_removable[start] or not texts[start].strip()):
        start += 1
    while start < end and (is_removable[end - 1] or not texts[end - 1].strip()):
        end -= 1
    return start if is_removable[:start].any() else 0, end if is_removable[end:].any() else len(texts)
