"""Shards → the token files of both splits, in corpus order, copied by threads and by machines side by side.

When all shards are finished, their lengths and the draw of validation documents (`held_out`) say where each lies in the
.bin and the .idx of both splits. So each shard is copied by itself, in any order, to its place in the work folder.

A corpus never lies on the disk twice: each thread copies `CHECKPOINT_BYTES` at most, syncs them, marks these shards as
copied (their ``.lengths`` is renamed), and deletes their ids. A merge that was killed copies what has no mark.
"""

import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara.base.durable import sync_folder
from zerokara.base.errors import Fault, UserError
from zerokara.base.progress import Progress
from zerokara.base.resources import available_cores
from zerokara.config.data import DataSettings
from zerokara.corpus.read import gathered
from zerokara.tokens.held_out import document_keys, num_valid_documents, valid_threshold
from zerokara.tokens.indexed import DOCUMENT_BYTES, HEADER, TokenPaths, header_bytes, index_part
from zerokara.tokens.quarantine import SourceTally, SplitTally
from zerokara.tokens.shard_tasks import Part
from zerokara.tokens.shards import ShardResult, ShardTask, check_shard, shard_path
from zerokara.tokens.work_folder import write_once

CHECKPOINT_BYTES = 256 * 1024 * 1024
"""Ids that a thread copies before they are synced and their shards deleted."""
NUM_THREADS = 8
COPIED = "copied"
"""Ending of the lengths of a shard that is in the merged files."""
SPLIT_NAME = "merge.json"
_CHUNK_BYTES = 1024 * 1024
_UNFINISHED_NAMES = ("train.bin", "train.idx", "valid.bin", "valid.idx")
"""Names in the work folder of the files of both splits, as in `TokenPaths.splits`."""


def copied(folder: Path) -> set[str]:
    """Names of the shards that are in the merged files, whose own ids may be deleted."""
    return {path.stem for path in folder.glob(f"*.{COPIED}")}


class Merge:
    """All shards in corpus order, the split of their documents, and the place of each in the token files.

    Raises:
        UserError: a source has too few documents, or others merge with other settings of the split.
        RunError: a shard is damaged, which is removed.
    """

    def __init__(
        self,
        config: DataSettings,
        folder: Path,
        tasks: Sequence[ShardTask],
        results: Mapping[str, ShardResult],
        tallies: Sequence[SourceTally],
        dtype: np.dtype[Any],
    ):
        """Count the documents of both splits, in the `tallies` of the sources, too."""
        self._config, self._folder, self._dtype = config, folder, dtype
        self._results, self._sources = [results[task.name] for task in tasks], [task.source for task in tasks]
        self._thresholds = []
        for source, tally in enumerate(tallies):
            num_valid = num_valid_documents(config, source, tally.documents)
            self._thresholds.append(valid_threshold(tally.documents, num_valid, config.split_seed, source))
        self._firsts, documents = list[int](), Counter[int]()
        """Number in its source of the first document of each shard."""
        for source, result in zip(self._sources, self._results, strict=True):
            self._firsts.append(documents[source])
            documents[source] += result.documents
        counts, num = list[list[list[int]]](), len(tasks)
        with ThreadPoolExecutor(NUM_THREADS) as pool, Progress("counting the documents", num, "shard") as progress:
            for count in pool.map(self._count, range(num)):
                counts.append(count)
                progress.advance()
        by_shard = np.array(counts, np.int64)  # [shards, splits, (documents, ids, bytes of text)]
        for source, tally in enumerate(tallies):
            train, valid = by_shard[np.equal(self._sources, source)].sum(0).tolist()
            tally.train, tally.valid = SplitTally(*train), SplitTally(*valid)
        self._totals, self._starts = by_shard.sum(0).tolist(), (by_shard.cumsum(0) - by_shard).tolist()

    def copy(self, part: Part) -> None:
        """Copy the shards of a part that are not copied yet, in several threads."""
        config = self._config
        split = config.model_dump(include={"valid_fraction", "valid_min_documents", "split_seed"})
        split["sources"] = len(config.input_jsonl)
        was = write_once(self._folder / SPLIT_NAME, split)
        changed = [f"{key} was {was.get(key)}, here it is {now}" for key, now in split.items() if was.get(key) != now]
        if changed:
            rule = f"is being merged with other settings of the split: {'; '.join(changed)}"
            remedy = "use those settings, which all parts must share, or delete this folder to start over"
            raise UserError(Fault(str(self._folder), rule, remedy=remedy))
        sizes, done = np.array([result.files["bin"][0] for result in self._results], np.int64), copied(self._folder)
        # Consecutive ones: two machines that write to the same page of a file would wait for each other.
        is_own = (sizes.cumsum() - sizes) * part.num_parts // max(1, sizes.sum()) == part.number
        left = [number for number in np.flatnonzero(is_own).tolist() if self._results[number].name not in done]
        if not left:  # a run that was killed may have given the files their final names already
            return
        threads = max(1, min(NUM_THREADS, available_cores() // 2, len(left) // NUM_THREADS))
        batches = gathered(left, sizes.__getitem__, min(CHECKPOINT_BYTES, int(sizes.sum()) // (2 * threads)))
        before = int(sizes[is_own].sum() - sizes[left].sum())
        progress = Progress("merging the shards", int(sizes[is_own].sum()), "B", done=before)
        with self._opened() as files, progress, ThreadPoolExecutor(threads) as pool:
            try:
                for future in as_completed([pool.submit(self._copy, files, batch) for batch in batches]):
                    progress.advance(future.result())
            finally:
                pool.shutdown(cancel_futures=True)

    def give_final_names(self, paths: TokenPaths) -> None:
        """Rename the files; first delete an earlier run's manifest, which describes the earlier files."""
        paths.manifest.unlink(missing_ok=True)
        for number, (name, path) in enumerate(zip(_UNFINISHED_NAMES, paths.splits, strict=True)):
            if number > 1 and not self._totals[1][0]:
                path.unlink(missing_ok=True)
            elif (self._folder / name).exists():  # else a run that was killed in the middle of this has renamed it
                os.replace(self._folder / name, path)
        sync_folder(paths.manifest.parent)

    def _lengths(self, number: int) -> NDArray[np.int32]:
        """int32[documents, 2] of (ids, bytes of text) in a shard."""
        result = self._results[number]
        try:
            content = shard_path(self._folder, result.name, "lengths").read_bytes()
        except FileNotFoundError:
            content = shard_path(self._folder, result.name, COPIED).read_bytes()
        check_shard(self._folder, result, "lengths", len(content), zlib.crc32(content))
        return np.frombuffer(content, np.int32).reshape(-1, 2)

    def _in_valid(self, number: int) -> NDArray[np.bool_]:
        """bool[documents]: which of a shard are for validation."""
        source, count = self._sources[number], self._results[number].documents
        if (threshold := self._thresholds[source]) is None:
            return np.zeros(count, dtype=np.bool_)
        return document_keys(self._firsts[number], count, self._config.split_seed, source) <= np.uint64(threshold)

    def _count(self, number: int) -> list[list[int]]:
        """(documents, ids, bytes of text) of each split in a shard."""
        lengths, in_valid = self._lengths(number), self._in_valid(number)
        splits = lengths[~in_valid], lengths[in_valid]
        return [[len(split), *split.sum(0, dtype=np.int64).tolist()] for split in splits]

    @contextmanager
    def _opened(self) -> Iterator[list[int]]:
        """Open the unfinished files at their full size."""
        # Never to be read: an NFS client that may read a page writes all of it back, with old bytes of another one's.
        files = [
            os.open(path, os.O_WRONLY | os.O_CREAT, 0o666) for path in map(self._folder.joinpath, _UNFINISHED_NAMES)
        ]
        try:
            for (documents, ids, _), data, index in zip(self._totals, files[::2], files[1::2], strict=True):
                os.ftruncate(data, ids * self._dtype.itemsize)
                os.ftruncate(index, HEADER.size + documents * DOCUMENT_BYTES + 8)
                write_at(index, header_bytes(documents, documents + 1, self._dtype), 0)
            sync_folder(self._folder)
            yield files
        finally:
            for file in files:
                os.close(file)

    def _copy(self, files: Sequence[int], numbers: Sequence[int]) -> int:
        """Copy some shards; once they are surely on the disk, mark them and delete their ids. Return these bytes."""
        names = [self._results[number].name for number in numbers]
        for number in numbers:
            self._copy_shard(files, number)
        for file in files:
            os.fsync(file)
        for name in names:
            os.replace(shard_path(self._folder, name, "lengths"), shard_path(self._folder, name, COPIED))
        sync_folder(self._folder)
        for name in names:
            shard_path(self._folder, name, "bin").unlink()
        return sum(self._results[number].files["bin"][0] for number in numbers)

    def _copy_shard(self, files: Sequence[int], number: int) -> None:
        result, width, checksum = self._results[number], self._dtype.itemsize, 0
        lengths, in_valid = self._lengths(number)[:, 0], self._in_valid(number)
        runs = np.split(lengths, np.flatnonzero(in_valid[1:] != in_valid[:-1]) + 1)  # of the same split
        split, places = int(in_valid[:1].any()), [first_id * width for _, first_id, _ in self._starts[number]]
        with open(shard_path(self._folder, result.name, "bin"), "rb") as ids:
            for run in runs:
                left = int(run.sum(dtype=np.int64)) * width
                while left and (chunk := ids.read(min(left, _CHUNK_BYTES))):
                    write_at(files[2 * split], chunk, places[split])
                    checksum = zlib.crc32(chunk, checksum)
                    places[split] += len(chunk)
                    left -= len(chunk)
                split = 1 - split
            check_shard(self._folder, result, "bin", ids.tell(), checksum)
        for split, chosen in enumerate((~in_valid, in_valid)):
            document, first_id, _ = self._starts[number][split]
            for entries, place in index_part(self._totals[split][0], document, first_id, lengths[chosen], width):
                write_at(files[2 * split + 1], entries, place)


def write_at(descriptor: int, content: bytes, place: int) -> None:
    """Write all of `content` at a place of an open file."""
    left = memoryview(content)
    while left:
        written = os.pwrite(descriptor, left, place)
        left, place = left[written:], place + written
