"""Shards → the token files of both splits, in corpus order, copied by threads and by machines side by side.

Validation takes whole documents: `valid_jsonl`, or a draw from each source. Of a source's n documents the k =
max(valid_min_documents, round(valid_fraction · n)) with the smallest key are held out; the key of document i is a
bijective hash of i seeded by (split_seed, source), so the draw is a pure function of these, has no ties, and needs no
list: one comparison with a threshold decides the split of a document. The hash is the finalizer of SplitMix64 (Steele,
Lea, Flood 2014), every step of which is invertible.

When all shards are finished, their lengths and this draw say where each lies in the .bin and the .idx of both splits.
``merge.json`` keeps that, and from then on each shard is copied by itself, in any order, to its place in the files in
the work folder.

A corpus never lies on the disk twice: every `CHECKPOINT_BYTES`, and whenever the disk has no room for more, what was
copied is synced, its names are appended to a ``copied-*.txt``, and only then are these shards deleted. A merge that was
killed copies what is named in none of these files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from zerokara import file_lock
from zerokara.config.data import DataSettings
from zerokara.durable import sync_folder, write_json
from zerokara.errors import Fault, RunError, UserError
from zerokara.progress import Progress, log, plural
from zerokara.resources import available_cores
from zerokara.tokens.indexed import DOCUMENT_BYTES, HEADER, TokenPaths, bin_path, header_bytes, idx_path, index_part
from zerokara.tokens.shard_tasks import WHOLE, Part
from zerokara.tokens.shards import ShardResult, ShardTask, shard_path
from zerokara.tokens.statistics import SourceTally, SplitTally

CHECKPOINT_BYTES = 256 * 1024 * 1024
"""Ids that a thread copies before they are synced and their shards deleted."""
NUM_THREADS = 8
STATE_NAME = "merge.json"
_LOCK_SECONDS = 3600.0
"""Time for which a share waits for the one that counts the documents of all shards."""
_MARGIN_BYTES = 4 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
_SPLITS = ("train", "valid")
_KEYS_AT_ONCE = 1 << 20


def is_begun(folder: Path) -> bool:
    """True if a merge has begun here, and may have deleted shards."""
    return (folder / STATE_NAME).exists()


def copied(folder: Path) -> set[str]:
    """Names of the shards that are in the merged files, whose own files may be deleted."""
    return {name for path in folder.glob("copied-*.txt") for name in path.read_text(encoding="ascii").split()}


def forget_other_split(config: DataSettings, folder: Path, share: str = "") -> None:
    """Drop a merge that had begun with other settings of the split; the shards that it deleted are missing then.

    Raises UserError in a share of the work, since others may be merging.
    """
    if is_begun(folder) and orjson.loads((folder / STATE_NAME).read_bytes())["settings"] != _settings(config):
        if share:
            rule = "is being merged with other settings of the split"
            raise UserError(Fault(str(folder), rule, remedy="give all parts the same, or start step 2 by itself"))
        log(f"  other settings of the split: {plural(len(copied(folder)), 'merged shard')} to be encoded again")
        for path in [*folder.glob("copied-*.txt"), *_paths(folder), folder / STATE_NAME]:
            path.unlink(missing_ok=True)


def _settings(config: DataSettings) -> list[Any]:
    return [config.valid_fraction, config.valid_min_documents, config.split_seed, len(config.input_jsonl)]


def _paths(folder: Path) -> list[Path]:
    """The unfinished files: .bin and .idx of each split."""
    return [path_of(folder / name) for name in _SPLITS for path_of in (bin_path, idx_path)]


def merge_shards(
    config: DataSettings,
    tasks: Sequence[ShardTask],
    results: Mapping[str, ShardResult],
    folder: Path,
    paths: TokenPaths,
    dtype: np.dtype[Any],
    tallies: list[SourceTally],
    share: Part = WHOLE,
) -> None:
    """Write both splits, count their contents, and give the files their final names at the very end.

    `tasks` are all, in corpus order; `tallies` are of each source. A `share` copies only its own shards. Raises
    UserError for a source with too few documents, and as `_Shards.check`.
    """
    shards = _Shards(config, tasks, results, folder)
    state = _planned(shards, tallies)
    counts = np.array([state["shards"][task.name] for task in tasks], np.int64)
    sources = np.array([task.source for task in tasks])
    for source, tally in enumerate(tallies):
        train, valid = counts[sources == source].sum(0).tolist()
        tally.train, tally.valid = SplitTally(*train), SplitTally(*valid)
    sizes, done = np.array([result.files["bin"][0] for result in shards.results], np.int64), copied(folder)
    # Consecutive ones: two machines that write to the same page of a file would wait for each other.
    is_own = (sizes.cumsum() - sizes) * share.of // max(1, sizes.sum()) == share.number
    left = [each for each in np.flatnonzero(is_own).tolist() if shards.results[each].name not in done]
    if left:  # else a run that was killed may have given the files their final names already
        most = max(shards.needed_bytes(each) for each in left)
        threads = max(1, min(NUM_THREADS, available_cores() // 2, shutil.disk_usage(folder).free // most))
        count = max(1, CHECKPOINT_BYTES // most)
        batches = [left[first : first + count] for first in range(0, len(left), count)]
        before = int(sizes[is_own].sum() - sizes[left].sum())
        with ExitStack() as stack:
            progress = Progress("merging the shards", int(sizes[is_own].sum()), "B", done=before)
            stack.enter_context(progress)
            record = stack.enter_context(open(folder / f"copied-{share.number}-of-{share.of}.txt", "ab"))
            copier = _Copier(shards, counts, dtype, record, threads, stack)
            pool = stack.enter_context(ThreadPoolExecutor(threads))
            stack.callback(copier.stopped.set)  # the first thing to happen when one has failed, or after Ctrl-C
            for future in as_completed([pool.submit(copier.copy, batch) for batch in batches]):
                progress.advance(future.result())
            copier.sync()
    if share == WHOLE:
        _give_final_names(folder, any(tally.valid.documents for tally in tallies), paths)


def num_valid_documents(config: DataSettings, source: int, num_documents: int) -> int:
    """Number of a source's validation documents: all of held-out text, 0 where none are drawn.

    Raises UserError if it has no documents, or less than half would be for training.
    """
    key, name = config.entries[source]
    if num_documents == 0:
        raise UserError(config.fault(key, f"the source {name} holds no document with text"))
    if config.valid_jsonl or config.valid_fraction == 0:
        return num_documents if key == "valid_jsonl" else 0
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


def valid_threshold(num_documents: int, num_valid: int, split_seed: int, source: int) -> int | None:
    """The largest key of a validation document, None if there is none; memory grows with `num_valid` only."""
    if num_valid == 0:
        return None
    smallest = np.empty(0, dtype=np.uint64)
    for first in range(0, num_documents, _KEYS_AT_ONCE):
        keys = document_keys(first, min(_KEYS_AT_ONCE, num_documents - first), split_seed, source)
        smallest = np.concatenate([smallest, keys])
        if len(smallest) > num_valid:
            smallest = np.partition(smallest, num_valid - 1)[:num_valid]
    return int(smallest.max())


class _Shards:
    """The shards of the corpus, each by its number in the order of the corpus."""

    def __init__(
        self, config: DataSettings, tasks: Sequence[ShardTask], results: Mapping[str, ShardResult], folder: Path
    ) -> None:
        self.config, self.folder = config, folder
        self.results = [results[task.name] for task in tasks]
        self.thresholds: list[int | None] = []
        """The largest key of a validation document, of each source; None where there is none."""
        self._sources = [task.source for task in tasks]
        self._firsts, documents = list[int](), Counter[int]()
        for source, result in zip(self._sources, self.results, strict=True):
            self._firsts.append(documents[source])
            documents[source] += result.documents

    def check(self, number: int, ending: str, size: int, checksum: int) -> None:
        """Raise RunError if size or CRC-32 are not those that were written; the shard counts as unfinished then."""
        result = self.results[number]
        if [size, checksum] != [*result.files[ending]]:
            shard_path(self.folder, result.name, "json").unlink(missing_ok=True)
            rule = f"the shard {result.name} on the disk differs from what was written, as after a power cut"
            raise RunError(f"{rule}; it is removed. The same command makes it again")

    def lengths(self, number: int) -> NDArray[np.int32]:
        """int32[documents, 2] of (ids, bytes of text)."""
        content = shard_path(self.folder, self.results[number].name, "lengths").read_bytes()
        self.check(number, "lengths", len(content), zlib.crc32(content))
        return np.frombuffer(content, np.int32).reshape(-1, 2)

    def in_valid(self, number: int) -> NDArray[np.bool_]:
        """bool[documents]: which are for validation."""
        source, count = self._sources[number], self.results[number].documents
        if (threshold := self.thresholds[source]) is None:
            return np.zeros(count, dtype=np.bool_)
        return document_keys(self._firsts[number], count, self.config.split_seed, source) <= np.uint64(threshold)

    def count(self, number: int) -> list[list[int]]:
        """(documents, ids, bytes of text) of each split."""
        lengths, in_valid = self.lengths(number), self.in_valid(number)
        parts = (lengths[~in_valid], lengths[in_valid])
        return [[len(part), *part.sum(0, dtype=np.int64).tolist()] for part in parts]

    def needed_bytes(self, number: int) -> int:
        """Bytes that a shard takes in the merged files."""
        result = self.results[number]
        return int(result.files["bin"][0]) + DOCUMENT_BYTES * result.documents


def _planned(shards: _Shards, tallies: Sequence[SourceTally]) -> dict[str, Any]:
    """The state of the merge, begun if it is not: ``shards`` has (documents, ids, bytes of text) by split, of each."""
    folder, config = shards.folder, shards.config
    with file_lock.held(folder / f"{STATE_NAME}.lock", _LOCK_SECONDS) as is_ours:
        if not is_ours:
            raise RunError("another share of the merge still counts the documents: run the same command later")
        if not is_begun(folder):
            for source, tally in enumerate(tallies):
                num_valid = num_valid_documents(config, source, tally.documents)
                shards.thresholds.append(valid_threshold(tally.documents, num_valid, config.split_seed, source))
            num, counts = len(shards.results), dict[str, list[list[int]]]()
            with ThreadPoolExecutor(NUM_THREADS) as pool, Progress("counting the documents", num, "shard") as progress:
                for result, count in zip(shards.results, pool.map(shards.count, range(num)), strict=True):
                    counts[result.name] = count
                    progress.advance()
            fresh = {"settings": _settings(config), "thresholds": shards.thresholds, "shards": counts}
            write_json(folder / STATE_NAME, fresh)
    state: dict[str, Any] = orjson.loads((folder / STATE_NAME).read_bytes())
    shards.thresholds = state["thresholds"]
    return state


class _Copier:
    """Copies shards to their places in the unfinished files, in several threads."""

    def __init__(
        self,
        shards: _Shards,
        counts: NDArray[np.int64],
        dtype: np.dtype[Any],
        record: IO[bytes],
        num_threads: int,
        stack: ExitStack,
    ) -> None:
        self._shards, self._num_threads, self._id_bytes = shards, num_threads, dtype.itemsize
        self._totals, self._starts = counts.sum(0).tolist(), (counts.cumsum(0) - counts).tolist()
        self._record, self._lock = record, threading.Lock()
        self.stopped = threading.Event()
        """Set to let each thread end after the shard at hand."""
        # Never to be read: an NFS client that may read a page writes all of it back, with old bytes of another one's.
        self._files = [os.open(path, os.O_WRONLY | os.O_CREAT, 0o666) for path in _paths(shards.folder)]
        for file in self._files:
            stack.callback(os.close, file)
        for (documents, ids, _), data, index in zip(self._totals, self._files[::2], self._files[1::2], strict=True):
            os.ftruncate(data, ids * self._id_bytes)
            os.ftruncate(index, HEADER.size + documents * DOCUMENT_BYTES + 8)
            write_at(index, header_bytes(documents, documents + 1, dtype), 0)
        sync_folder(shards.folder)

    def copy(self, numbers: Sequence[int]) -> int:
        """Copy some shards, and delete them; return the bytes of their ids."""
        finished: list[ShardResult] = []
        num_bytes, folder, width = 0, self._shards.folder, self._id_bytes
        try:
            for number in numbers:
                if self.stopped.is_set():
                    break
                needed = self._num_threads * self._shards.needed_bytes(number)
                if shutil.disk_usage(folder).free < needed + _MARGIN_BYTES:
                    self._delete(finished)
                result, checksum = self._shards.results[number], 0
                lengths, in_valid = self._shards.lengths(number)[:, 0], self._shards.in_valid(number)
                runs = np.split(lengths, np.flatnonzero(in_valid[1:] != in_valid[:-1]) + 1)  # of the same split
                split, places = int(in_valid[:1].any()), [token * width for _, token, _ in self._starts[number]]
                with open(shard_path(folder, result.name, "bin"), "rb") as ids:
                    for run in runs:
                        left = int(run.sum(dtype=np.int64)) * width
                        while left and (piece := ids.read(min(left, _PIECE_BYTES))):
                            write_at(self._files[2 * split], piece, places[split])
                            checksum = zlib.crc32(piece, checksum)
                            places[split] += len(piece)
                            left -= len(piece)
                        split = 1 - split
                    self._shards.check(number, "bin", ids.tell(), checksum)
                for split, chosen in enumerate((~in_valid, in_valid)):
                    document, token, _ = self._starts[number][split]
                    for entries, place in index_part(self._totals[split][0], document, token, lengths[chosen], width):
                        write_at(self._files[2 * split + 1], entries, place)
                finished.append(result)
                num_bytes += result.files["bin"][0]
        finally:
            self._delete(finished)
        return num_bytes

    def _delete(self, finished: list[ShardResult]) -> None:
        """Delete shards that are copied, once their copies are surely on the disk."""
        if not finished:
            return
        self.sync()
        with self._lock:
            self._record.write("".join(f"\n{result.name}\n" for result in finished).encode("ascii"))
            self._record.flush()
            os.fsync(self._record.fileno())
        for result in finished:
            for ending in ("bin", "lengths"):
                shard_path(self._shards.folder, result.name, ending).unlink()
        finished.clear()

    def sync(self) -> None:
        """Sync the merged files."""
        for file in self._files:
            os.fsync(file)


def write_at(descriptor: int, content: bytes, place: int) -> None:
    """Write all of `content` at a place of an open file."""
    left = memoryview(content)
    while left:
        written = os.pwrite(descriptor, left, place)
        left, place = left[written:], place + written


def _give_final_names(folder: Path, has_valid: bool, paths: TokenPaths) -> None:
    """Rename the files; first delete an earlier run's manifest, which describes the earlier files."""
    final = [path_of(prefix) for prefix in (paths.train, paths.valid) for path_of in (bin_path, idx_path)]
    paths.manifest.unlink(missing_ok=True)
    for number, (written, path) in enumerate(zip(_paths(folder), final, strict=True)):
        if number > 1 and not has_valid:
            path.unlink(missing_ok=True)
        elif written.exists():  # else a run that was killed in the middle of this has renamed it
            os.replace(written, path)
    sync_folder(paths.manifest.parent)
