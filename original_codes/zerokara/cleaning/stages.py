"""The stages, each the work of one task: the text is read, copies and repeated lines are found, the text is written.

A document that no rule drops by itself is known by its id: the number of its task, shifted left by `RANK` bits, plus
its number in the task. Of equal documents the one with the lowest id stays, whatever the number of workers. Keys of
what is compared are saved in their order, and compared in parts, each a range of all possible keys, so that a part
needs memory for its share alone.

MinHash is rensa's (fast similarity sketching: Dahlgaard, Knudsen and Thorup, 2017, arXiv 1704.04370), in which the
share of equal values estimates the Jaccard similarity of two sets of n-grams, as in Broder's original.
"""

import os
import re
import unicodedata
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from zerokara.base.durable import atomic_file, write_json
from zerokara.cleaning.plan import CLEAN, EXACT, LINES, LOST, NEAR, READ, UNREADABLE, Plan, facts, joined, save, saved
from zerokara.cleaning.rules import Judge
from zerokara.corpus.compressed import zstd_module
from zerokara.corpus.documents import HARMLESS, BadLine
from zerokara.corpus.find import check_unchanged
from zerokara.corpus.token_hashes import UNSPACED, Hashes, hashes_of, ngrams

os.environ.setdefault("RAYON_NUM_THREADS", "1")  # read when rensa is first used: a task has one core
import rensa

Ids = NDArray[np.uint64]
RANK = 32
NUM_VALUES = 256
"""Values of a signature; an estimate of 0.8 has a standard error of 0.025."""
_NGRAM = 5
_FOUND = 0.995
"""Least probability that a pair at the threshold shares a band."""
_LEAST_SHOWN, _NUM_SHOWN, _SHOWN_CHARACTERS = 20, 12, 100_000
"""Documents with a line that the report shows, where the rule is off; pairs and lines shown; characters of a text."""
_MIN_ROW_CHARACTERS = 40
"""Characters that a site repeats in a row, at least: more than "Chapter the First" and "The End", which books share."""
_UNSPACED = re.compile(f"[{UNSPACED}]")
"""Characters that count as two: in these scripts so many say as much."""
_CHUNK = 1 << 16


def bands_of(threshold: float) -> tuple[int, int]:
    """Number of bands of a signature, and of values in each, so that few pairs at the threshold share none."""
    sizes = [size for size in range(1, 33) if 1 - (1 - threshold**size) ** (NUM_VALUES // size) >= _FOUND]
    return NUM_VALUES // max(sizes), max(sizes)


def read(plan: Plan, folder: Path, rank: int, num_tasks: int) -> None:
    """Judge the documents of a task, and save what the next stages need.

    These are the keys of `copies` (of the whole text, and of each band of the signature) and of `lines`, with the ids,
    in their order; `signatures`, the low byte of each value, then eight of the text's hash; `places`, the number of the
    range and the line in it; and the `verdicts` on all documents.
    """
    config, judge, last_lines = plan.config, Judge(plan), [0] * len(plan.tasks[rank])
    num_bands, size = bands_of(config.near_duplicates) if config.near_duplicates else (0, 1)
    verdicts, places, signatures = bytearray(), array("I"), bytearray()
    tables = {"copies": (array("Q"), array("Q")), "lines": (array("Q"), array("Q"))}
    document = rank << RANK
    for part, line, item in plan.read(rank):
        last_lines[part] = 0 if item.file.format == "parquet" else line
        if isinstance(item, BadLine):
            continue
        rule = judge.rule_broken(item.text)
        verdicts.append(plan.rules.index(rule) + 1 if rule else 0)
        if rule:
            continue
        whole, values = xxh3_64_digest(item.text.encode()), np.zeros(NUM_VALUES, np.uint32)
        copies = [int.from_bytes(whole)] if config.exact_duplicates else []
        if num_bands and len(hashes := hashes_of(item.text, with_signs=True)):
            found = ngrams(hashes, min(_NGRAM, len(hashes)))
            digests = rensa.RMinHash.digest_matrix_from_flat_token_hashes(found, [0, len(found)], NUM_VALUES, 1)
            values[:] = digests.to_rows()[0]
            bands = values[: num_bands * size].reshape(num_bands, size)
            copies += [xxh3_64_intdigest(band.tobytes(), number) for number, band in enumerate(bands)]
        lines = [key for each in item.text.split("\n") if (key := line_key(each))]
        for name, keys in (("copies", copies), ("lines", {*lines, *map(pair_key, lines, [*lines[1:], *lines[:1]])})):
            tables[name][0].extend(keys)
            tables[name][1].extend([document] * len(keys))
        signatures += values.astype(np.uint8).tobytes() + whole
        places.extend((part, line))
        document += 1
    check_unchanged([part.file for part in plan.tasks[rank]])
    for name, columns in tables.items():
        table = np.stack([np.asarray(each) for each in columns])
        save(folder, name, rank, table[:, np.argsort(table[0], kind="stable")])
    save(folder, "signatures", rank, np.asarray(signatures).reshape(-1, NUM_VALUES + 8))
    save(folder, "places", rank, np.asarray(places).reshape(-1, 2))
    save(folder, "verdicts", rank, np.asarray(verdicts))
    told = {"last_lines": last_lines, "counts": judge.counts, "examples": judge.examples}
    write_json(folder / f"read-{rank:05d}.json", told)


def line_key(line: str) -> int:
    """An even number for a line without regard to case and the white space around it, 0 for an empty one."""
    line = line.strip()
    return xxh3_64_intdigest(line.lower().encode()) & ~1 if line else 0


def pair_key(line: int, following: int) -> int:
    """An odd number for a line beside another, by their keys."""
    return (line * 0x9E3779B97F4A7C15 + following) & ((1 << 64) - 1) | 1


def _part_of(folder: Path, table: str, part: int, num_parts: int) -> tuple[Hashes, Ids]:
    """The keys of a part in their order, and the ids; of one key these are in order."""
    step, found = (1 << 64) // num_parts + 1, []
    first, last = np.uint64(part * step), np.uint64(min((part + 1) * step, 1 << 64) - 1)
    for rank in range(num_parts):
        own = saved(folder, table, rank)
        found.append(np.array(own[:, np.searchsorted(own[0], first) : np.searchsorted(own[0], last, "right")]))
    keys, ids = np.concatenate(found, axis=1)  # copied: each open array holds a file
    order = np.argsort(keys, kind="stable")
    return keys[order], ids[order]


def pairs(plan: Plan, folder: Path, part: int, num_parts: int) -> None:
    """Save a part of the pairs that are alike: a later document, an earlier one, and 1 if they are equal."""
    keys, ids = _part_of(folder, "copies", part, num_parts)
    is_first = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
    firsts = ids[is_first][np.cumsum(is_first) - 1]
    found = [np.stack([ids, each], axis=1)[~is_first] for each in (firsts, np.roll(ids, 1))]  # and the one before
    candidates = np.unique(np.concatenate(found), axis=0)
    alike = [np.zeros((0, 3), np.uint64)]
    for start in range(0, len(candidates), _CHUNK):
        chunk = candidates[start : start + _CHUNK]
        values, is_equal = compare(folder, *chunk.T)
        rows = np.column_stack([chunk, (is_equal & plan.config.exact_duplicates).astype(np.uint64)])
        alike.append(rows[(values >= min_similarity(plan.config.near_duplicates)) | (rows[:, 2] > 0)])
    save(folder, "pairs", part, np.concatenate(alike))


def min_similarity(threshold: float) -> float:
    """The least estimate that is taken: 1.5 standard errors below the threshold, so that few pairs at it are missed."""
    return threshold - 1.5 * float(np.sqrt(threshold * (1 - threshold) / NUM_VALUES)) if threshold else 2.0


def compare(folder: Path, ids: Ids, others: Ids) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Estimate the Jaccard similarity of pairs, and tell if they are equal; one in 256 unequal values looks equal."""
    sides = []
    for side in (ids, others):
        ranks, rows = side >> np.uint64(RANK), side & np.uint64((1 << RANK) - 1)
        sides.append(np.empty((len(side), NUM_VALUES + 8), np.uint8))
        for rank in np.unique(ranks).tolist():
            sides[-1][ranks == rank] = saved(folder, "signatures", rank)[rows[ranks == rank]]
    same = sides[0] == sides[1]
    return (same[:, :NUM_VALUES].mean(axis=1) - 1 / 256) / (1 - 1 / 256), same[:, NUM_VALUES:].all(axis=1)


def choose(plan: Plan, folder: Path, rank: int, num_tasks: int) -> None:
    """Save, in columns, the documents that are `dropped` as copies: document, the one that stays, 1 if it equals an
    earlier one.

    The copy of a copy is compared with the document that stays, so that no chain of small changes drops what is unlike
    all that stays.
    """
    originals, equal = dict[int, int](), bytearray()
    alike, least = np.unique(joined(folder, "pairs"), axis=0), min_similarity(plan.config.near_duplicates)
    for copy, earlier, is_equal in alike[np.lexsort([1 - alike[:, 2], alike[:, 0]])].tolist():
        if copy not in originals:
            first = originals.get(earlier, earlier)
            pair = np.array([[copy], [first]], np.uint64)
            if is_equal or first == earlier or compare(folder, *pair)[0][0] >= least:
                originals[copy] = first
                equal.append(is_equal)
    columns = (np.fromiter(each, np.uint64) for each in (originals, originals.values(), equal))
    save(folder, "dropped", 0, np.stack([*columns]))


def count_lines(plan: Plan, folder: Path, part: int, num_parts: int) -> None:
    """Save a part of the `repeated` lines of the documents that stay: key, number of documents, the first of them."""
    keys, ids = _part_of(folder, "lines", part, num_parts)
    dropped = saved(folder, "dropped", 0)[0]
    places = np.minimum(np.searchsorted(dropped, ids), max(0, len(dropped) - 1))
    stays = dropped[places] != ids if len(dropped) else np.ones(len(ids), np.bool_)
    found, starts, counts = np.unique(keys[stays], return_index=True, return_counts=True)
    rows = np.stack([found, counts.astype(np.uint64), ids[stays][starts]], axis=1)
    save(folder, "repeated", part, rows[counts >= (plan.config.repeated_lines or _LEAST_SHOWN)])


def shown(folder: Path) -> tuple[list[tuple[float, int, int]], list[tuple[int, int, int]]]:
    """What the report shows: near duplicates of every similarity (it, copy, original), and the lines that most
    documents have (key, number of documents, the first)."""
    dropped, repeated = saved(folder, "dropped", 0), joined(folder, "repeated")
    near = dropped[:2, dropped[2] == 0].T
    near = near[:: max(1, len(near) // 1000)]
    values = compare(folder, *near.T)[0]
    order = np.argsort(values, kind="stable")[:: max(1, len(values) // _NUM_SHOWN)][:_NUM_SHOWN]
    repeated = repeated[repeated[:, 0] % 2 == 0]  # without pairs
    top = repeated[np.argsort(-repeated[:, 1].astype(np.int64), kind="stable")[:_NUM_SHOWN]]
    pairs_shown = zip(values[order].tolist(), *near[order].T.tolist(), strict=True)
    return [*pairs_shown], top.tolist()


def write(plan: Plan, folder: Path, rank: int, num_tasks: int) -> None:
    """Write the clean text of a task and what each rule dropped, with their places in the corpus."""
    repeated, dropped, before = joined(folder, "repeated"), saved(folder, "dropped", 0), _lines_before(plan, folder)
    own = slice(*np.searchsorted(dropped[0], np.array([rank << RANK, rank + 1 << RANK], np.uint64)))
    originals = {copy: (original, is_equal) for copy, original, is_equal in dropped[:, own].T.tolist()}
    pairs_shown, lines_shown = shown(folder)
    wanted = {each for _, *pair in pairs_shown for each in pair} | {first for _, _, first in lines_shown}
    tallies, texts, document = defaultdict[str, Counter[str]](Counter), list[tuple[int, str]](), rank << RANK
    verdicts, cleaned, damages = iter(saved(folder, "verdicts", rank).tolist()), array("Q"), dict[str, str]()

    def place(rank: int, part: int, line: int) -> dict[str, Any]:
        return {"source": plan.tasks[rank][part].file.name, "line": before[rank][part] + line}

    def repeats(key: int) -> bool:
        row = np.searchsorted(repeated[:, 0], np.uint64(key))
        return bool(row < len(repeated) and repeated[row, 0] == key and repeated[row, 2] != document)

    def count(name: str, units: Mapping[str, int]) -> None:
        tallies[name].update({f"{here['source']}\t{unit}": number for unit, number in units.items()})

    zstd = zstd_module()
    with_checksum = {zstd.CompressionParameter.checksum_flag: 1}
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}

        def put(name: str, text: str, units: Mapping[str, int] = MappingProxyType({}), **more: Any) -> None:
            if name not in files:
                file = stack.enter_context(atomic_file(folder / f"{name}-{rank:05d}.jsonl.zst"))
                files[name] = stack.enter_context(zstd.open(file, "wb", options=with_checksum))
            files[name].write(orjson.dumps({"text": text} | here | more, option=orjson.OPT_APPEND_NEWLINE))
            count(name, units or {"documents": 1, "bytes": len(text.encode())})

        for part, line, item in plan.read(rank):
            here = place(rank, part, line)
            if isinstance(item, BadLine):
                if item.reason not in HARMLESS:
                    units = {"documents": item.documents, "bytes": item.bytes}
                    count(READ, units)
                    units |= {item.reason: item.documents, LOST: item.lost_bytes}
                    put(UNREADABLE, item.excerpt, units, reason=item.reason)
                    if item.damage:
                        damages.setdefault(here["source"], item.damage)
                continue
            text, verdict = item.text, next(verdicts)
            count(READ, {"documents": 1, "bytes": len(text.encode())})
            if verdict:
                put(plan.rules[verdict - 1], text)
                continue
            if document in wanted:
                texts.append((document, text[:_SHOWN_CHARACTERS]))
            if document in originals:
                original, is_equal = originals[document]
                of_rank, row = divmod(original, 1 << RANK)
                copy_of = place(of_rank, *saved(folder, "places", of_rank)[row].tolist())
                put(EXACT if is_equal else NEAR, text, copy_of=copy_of)
            else:
                if plan.config.repeated_lines:
                    lines = text.split("\n")
                    start, end = own_lines(lines, repeats)
                    if (start, end) != (0, len(lines)):
                        put(LINES, "\n".join([*lines[:start], *lines[end:]]))
                        text = "\n".join(lines[start:end])
                if text:
                    put(CLEAN, text)
                    cleaned.append(xxh3_64_intdigest(text.encode()))
            document += 1
    check_unchanged([part.file for part in plan.tasks[rank]])
    save(folder, "cleaned", rank, np.array(cleaned))
    write_json(folder / f"write-{rank:05d}.json", {"tallies": tallies, "texts": texts, "damages": damages})


def own_lines(lines: Sequence[str], repeats: Callable[[int], bool]) -> tuple[int, int]:
    """Start and end of a text without the lines of its site and the empty lines beside them. The lines of a site are
    rows of repeated lines that stand beside each other in other documents, too (the last line of a text counts as
    beside its first), and shorter rows outside of these.
    """
    filled = [place for place, line in enumerate(lines) if line.strip()]
    keys, size = [line_key(lines[place]) for place in filled], len(filled)
    head = len([*takewhile(repeats, keys)])
    tail = size - len([*takewhile(repeats, reversed(keys[head:]))])
    site, row, letters = set[int](), list[int](), 0
    for number, following in pairwise([*range(tail, size), *range(head), -1]):
        row.append(number)
        line = "".join(each for each in lines[filled[number]].strip() if unicodedata.category(each)[0] != "M")
        letters += len(line) + len(_UNSPACED.findall(line))
        if following < 0 or not repeats(pair_key(keys[number], keys[following])):
            site.update(row if letters >= _MIN_ROW_CHARACTERS else ())
            row, letters = [], 0
    first, last = max(site & {*range(head)}, default=-1) + 1, min(site & {*range(tail, size)}, default=size)
    return [*filled, len(lines)][first] if first else 0, filled[last - 1] + 1 if last < size else len(lines)


def _lines_before(plan: Plan, folder: Path) -> list[list[int]]:
    """Lines before each range of each task, in its file."""
    counted, before = Counter[str](), list[list[int]]()
    for task, found in zip(plan.tasks, facts(folder, "read", len(plan.tasks)), strict=True):
        before.append([])
        for part, last_line in zip(task, found["last_lines"], strict=True):
            before[-1].append(counted[part.file.name])
            counted[part.file.name] += last_line
    return before
