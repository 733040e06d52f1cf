"""Shards → the token files of both splits, in corpus order, by copying blocks of bytes.

Ids are copied to ``train.bin`` and ``valid.bin`` in the work folder, and shards are deleted on the way, so that a
corpus never lies on the disk twice: every `CHECKPOINT_BYTES`, and whenever the disk has no room for more, what was
copied is synced, ``merge.json`` records how far it has come, and only then the shards are deleted. A run that resumes a
killed one truncates the files to what ``merge.json`` says and continues from there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from zerokara.config.data import DataSettings
from zerokara.durable import sync_folder, write_json
from zerokara.progress import Progress
from zerokara.tokens import splits
from zerokara.tokens.accounts import SourceTally, SplitTally
from zerokara.tokens.indexed import INDEX_BYTES, write_index
from zerokara.tokens.layout import TokenPaths, bin_path, idx_path
from zerokara.tokens.shards import ShardResult, shard_path
from zerokara.tokens.tasks import Task

CHECKPOINT_BYTES = 256 * 1024 * 1024
STATE_NAME = "merge.json"
_BUFFER_BYTES = 1024 * 1024
_SPLITS = ("train", "valid")


@dataclass
class MergeState:
    """How far a merge has come."""

    settings: list[Any]
    """Those that decide which documents go to which split."""
    last_shard: str = ""
    """The last shard that was copied."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each unfinished file."""
    splits: list[dict[str, Any]] = field(default_factory=list)
    """What went into ``train`` and ``valid`` so far, for each source."""
    is_complete: bool = False
    """Whether the files are complete and only need their final names."""

    @classmethod
    def read(cls, folder: Path, config: DataSettings) -> MergeState:
        """The state of an unfinished merge, or a fresh one where there is none for these settings."""
        fresh = cls([config.valid_fraction, config.valid_min_documents, config.split_seed])
        state = cls.left_in(folder)
        if state is None or state.settings == fresh.settings:
            return state or fresh
        # The caller finds that the shards which the other merge deleted are missing, and encodes them again.
        (folder / STATE_NAME).unlink()
        return fresh

    @classmethod
    def left_in(cls, folder: Path) -> MergeState | None:
        """The state of an unfinished merge, for whatever settings."""
        try:
            return cls(**orjson.loads((folder / STATE_NAME).read_bytes()))
        except (FileNotFoundError, orjson.JSONDecodeError, TypeError):  # what cannot be read just now ends the step
            return None


class _SplitWriter:
    """The .bin and the lengths of one split, in the work folder."""

    def __init__(self, folder: Path, name: str, sizes: Mapping[str, int], files: ExitStack):
        self.prefix = folder / name
        self.lengths_path = folder / f"{name}.lengths"
        self._ids = _reopened(bin_path(self.prefix), sizes, files)
        self._lengths = _reopened(self.lengths_path, sizes, files)

    def add(self, ids: IO[bytes], num_bytes: int, lengths: NDArray[np.int32]) -> None:
        """Copy the next `num_bytes` of a shard's ids, which belong to documents of these lengths."""
        while num_bytes:
            block = ids.read(min(num_bytes, _BUFFER_BYTES))
            num_bytes -= len(block)
            self._ids.write(block)
        self._lengths.write(np.ascontiguousarray(lengths[:, 0]).data)

    def sync(self) -> dict[str, int]:
        """Sync both files; return their sizes."""
        for file in (self._ids, self._lengths):
            file.flush()
            os.fsync(file.fileno())
        return {Path(file.name).name: file.tell() for file in (self._ids, self._lengths)}

    def write_idx(self, dtype: np.dtype[Any]) -> None:
        """Write the index; the files of this split must be closed by now."""
        has_documents = self.lengths_path.stat().st_size > 0
        lengths = np.memmap(self.lengths_path, np.int32, mode="r") if has_documents else np.empty(0, np.int32)
        with open(idx_path(self.prefix), "wb", buffering=_BUFFER_BYTES) as file:
            write_index(file, lengths, dtype)


def _reopened(path: Path, sizes: Mapping[str, int], files: ExitStack) -> IO[bytes]:
    """Open a file to append where the state says; what was written beyond that is truncated."""
    file = files.enter_context(path.open("r+b" if path.exists() else "w+b", buffering=_BUFFER_BYTES))
    file.truncate(sizes.get(path.name, 0))
    file.seek(0, os.SEEK_END)
    return file


def merge_shards(
    config: DataSettings,
    tasks: Sequence[Task],
    results: Mapping[str, ShardResult],
    folder: Path,
    paths: TokenPaths,
    dtype: np.dtype[Any],
    tallies: list[SourceTally],
) -> None:
    """Write both splits, count their contents, and give the files their final names at the very end.

    `tasks` are all there are, in corpus order; `tallies` are of each source.

    Raises:
        UserError: a source has too few documents to be split.
    """
    thresholds = [_threshold(config, source, tally) for source, tally in enumerate(tallies)]
    state = MergeState.read(folder, config)
    for tally, done in zip(tallies, state.splits, strict=False):
        tally.train, tally.valid = SplitTally(**done["train"]), SplitTally(**done["valid"])
    if not state.is_complete:
        with ExitStack() as files:
            writers = [_SplitWriter(folder, name, state.sizes, files) for name in _SPLITS]
            _copy_all(config, tasks, results, folder, dtype, thresholds, writers, tallies, state)
        for writer in writers:
            writer.write_idx(dtype)
        if state.last_shard:  # shards are deleted: from here on only the final names are missing
            state.is_complete = True
            write_json(folder / STATE_NAME, state)
    _give_final_names(folder, any(tally.valid.documents for tally in tallies), paths)


def _copy_all(
    config: DataSettings,
    tasks: Sequence[Task],
    results: Mapping[str, ShardResult],
    folder: Path,
    dtype: np.dtype[Any],
    thresholds: Sequence[np.uint64 | None],
    writers: Sequence[_SplitWriter],
    tallies: list[SourceTally],
    state: MergeState,
) -> None:
    first, copied = 0, list[str]()

    def bytes_of(names: Sequence[str]) -> int:
        return sum(results[name].files["bin"][0] for name in names)

    def delete_copied() -> None:
        state.last_shard = copied[-1]
        state.sizes = {name: size for writer in writers for name, size in writer.sync().items()}
        state.splits = [{"train": tally.train, "valid": tally.valid} for tally in tallies]
        write_json(folder / STATE_NAME, state)
        for name in copied:
            for ending in ("bin", "lengths"):
                shard_path(folder, name, ending).unlink()
        copied.clear()

    with Progress("merging the shards", bytes_of([task.name for task in tasks]), "B") as progress:
        for index, task in enumerate(tasks):
            source, count, size = task.source, results[task.name].documents, bytes_of([task.name])
            if index and tasks[index - 1].source != source:
                first = 0
            if task.name > state.last_shard:
                if copied and _is_tight(folder, size + 4 * count):  # an int32 for the length of each
                    delete_copied()
                in_valid = splits.is_valid(first, count, thresholds[source], config.split_seed, source)
                _copy_shard(folder, task.name, in_valid, dtype, writers, tallies[source])
                copied.append(task.name)
            first += count
            progress.advance(size)
            if bytes_of(copied) >= CHECKPOINT_BYTES:
                delete_copied()
    if copied and _is_tight(folder, INDEX_BYTES * sum(results[task.name].documents for task in tasks)):
        delete_copied()


def _is_tight(folder: Path, num_bytes: int) -> bool:
    """Whether the disk may lack the room for so many bytes beside what is buffered."""
    return shutil.disk_usage(folder).free < num_bytes + 4 * _BUFFER_BYTES


def _threshold(config: DataSettings, source: int, tally: SourceTally) -> np.uint64 | None:
    documents = tally.documents
    num_valid = splits.num_valid_documents(documents, config.valid_fraction, config.valid_min_documents)
    splits.check_source(config, config.input_jsonl[source], documents, num_valid)
    return splits.valid_threshold(documents, num_valid, config.split_seed, source)


def _copy_shard(
    folder: Path,
    name: str,
    in_valid: NDArray[np.bool_],
    dtype: np.dtype[Any],
    writers: Sequence[_SplitWriter],
    tally: SourceTally,
) -> None:
    """Copy consecutive documents of the same split at once."""
    lengths = np.fromfile(shard_path(folder, name, "lengths"), np.int32).reshape(-1, 2)
    if not len(lengths):
        return
    ends = np.cumsum(lengths[:, 0], dtype=np.int64) * dtype.itemsize
    path = shard_path(folder, name, "bin")
    assert len(in_valid) == len(lengths) and int(ends[-1]) == path.stat().st_size
    edges = [0, *(np.flatnonzero(in_valid[1:] != in_valid[:-1]) + 1).tolist(), len(lengths)]
    with open(path, "rb") as ids:
        for start, end in pairwise(edges):
            first_byte = int(ends[start - 1]) if start else 0
            writers[int(in_valid[start])].add(ids, int(ends[end - 1]) - first_byte, lengths[start:end])
    tally.train.add(lengths[~in_valid])
    tally.valid.add(lengths[in_valid])


def _give_final_names(folder: Path, has_valid: bool, paths: TokenPaths) -> None:
    """Sync everything, then rename; first delete an earlier run's manifest, which describes the earlier files."""
    prefixes = {"train": paths.train, "valid": paths.valid}
    pairs = [
        (path_of(folder / name), path_of(prefixes[name]))
        for name in (_SPLITS if has_valid else _SPLITS[:1])
        for path_of in (bin_path, idx_path)
    ]
    # A missing file was renamed by a run that was killed in the middle of this.
    waiting = [(written, final) for written, final in pairs if written.exists()]
    for written, _ in waiting:
        with open(written, "rb") as file:
            os.fsync(file.fileno())
    paths.manifest.unlink(missing_ok=True)
    if not has_valid:
        for path_of in (bin_path, idx_path):
            path_of(paths.valid).unlink(missing_ok=True)
    for written, final in waiting:
        os.replace(written, final)
    sync_folder(paths.manifest.parent)
