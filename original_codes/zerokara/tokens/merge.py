"""Shards → the token files of both splits and the quarantine file, in corpus order, by copying blocks of bytes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from zerokara.config.pretrain_config import DataSettings
from zerokara.durable import appearing_file, sync_folder
from zerokara.tokens import splits
from zerokara.tokens.indexed import write_index
from zerokara.tokens.layout import TokenPaths, bin_path, idx_path
from zerokara.tokens.shards import ShardResult, Task, shard_path

_BUFFER_BYTES = 4 * 1024 * 1024


@dataclass
class SplitTally:
    """What went into one split."""

    documents: int = 0
    tokens: int = 0
    """With the end of each document."""
    text_bytes: int = 0
    """UTF-8 bytes of the documents' text."""

    def add(self, lengths: NDArray[np.int32]) -> None:
        """Count documents given as (ids, text bytes)."""
        self.documents += len(lengths)
        self.tokens += int(lengths[:, 0].sum(dtype=np.int64))
        self.text_bytes += int(lengths[:, 1].sum(dtype=np.int64))


@dataclass
class SourceTally:
    """What became of one source; `documents_in` = train + valid + the sum of `skipped`, always."""

    documents_in: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    train: SplitTally = field(default_factory=SplitTally)
    valid: SplitTally = field(default_factory=SplitTally)


class _SplitWriter:
    """The .bin and the lengths of one split, under temporary names."""

    def __init__(self, folder: Path, name: str, files: ExitStack):
        self.prefix = folder / name
        self._lengths_path = folder / f"{name}.lengths"
        self._ids: IO[bytes] = files.enter_context(bin_path(self.prefix).open("wb", buffering=_BUFFER_BYTES))
        self._lengths: IO[bytes] = files.enter_context(self._lengths_path.open("wb"))

    def add(self, ids: memoryview, lengths: NDArray[np.int32]) -> None:
        self._ids.write(ids)
        self._lengths.write(np.ascontiguousarray(lengths[:, 0]).data)

    def write_idx(self, dtype: np.dtype[Any]) -> None:
        """Write the index; the files of this split must be closed by now."""
        there = self._lengths_path.stat().st_size > 0
        lengths = np.memmap(self._lengths_path, np.int32, mode="r") if there else np.empty(0, np.int32)
        with open(idx_path(self.prefix), "wb", buffering=_BUFFER_BYTES) as file:
            write_index(file, lengths, dtype)


def merge_shards(
    config: DataSettings,
    tasks: Sequence[Task],
    results: dict[int, ShardResult],
    folder: Path,
    paths: TokenPaths,
    dtype: np.dtype[Any],
) -> list[SourceTally]:
    """Write both splits, each shard being removed once it is copied, and let the files appear at the very end.

    Raises:
        UserError: a source has too few documents to be split.
    """
    tallies = [SourceTally() for _ in config.input_jsonl]
    for task in tasks:
        result = results[task.number]
        tallies[task.source].documents_in += sum(result.range_items)
        tallies[task.source].skipped += result.skipped
    thresholds = [_threshold(config, source, tally) for source, tally in enumerate(tallies)]

    with ExitStack() as files:
        train, valid = _SplitWriter(folder, "train", files), _SplitWriter(folder, "valid", files)
        first = 0
        for index, task in enumerate(tasks):
            source, count = task.source, results[task.number].documents
            if index and tasks[index - 1].source != source:
                first = 0
            in_valid = splits.is_valid(first, count, thresholds[source], config.split_seed, source)
            _copy_shard(folder, task.number, in_valid, dtype, (train, valid), tallies[source])
            first += count
    for writer in (train, valid):
        writer.write_idx(dtype)
    _let_appear(train.prefix, valid.prefix if any(tally.valid.documents for tally in tallies) else None, paths)
    return tallies


def write_quarantine(tasks: Sequence[Task], results: dict[int, ShardResult], folder: Path, paths: TokenPaths) -> None:
    """Gather the bad lines of all shards, with lines counted from 1 in their file; no file when there are none."""
    if not any(results[task.number].skipped for task in tasks):
        paths.quarantine.unlink(missing_ok=True)
        return
    with appearing_file(paths.quarantine) as file:
        lines_before, last_path = 0, None
        for task in tasks:
            starts = []
            for range_, items in zip(task.ranges, results[task.number].range_items, strict=True):
                if range_.file.path != last_path:
                    lines_before, last_path = 0, range_.file.path
                starts.append(lines_before)
                lines_before += items
            with open(shard_path(folder, task.number, "bad"), "rb") as bad_lines:
                for line in bad_lines:
                    record = orjson.loads(line)
                    number = record.pop("range")
                    record["line"] += starts[number]
                    placed = {"file": str(task.ranges[number].file.path), **record}
                    file.write(orjson.dumps(placed, option=orjson.OPT_APPEND_NEWLINE))


def _threshold(config: DataSettings, source: int, tally: SourceTally) -> np.uint64 | None:
    documents = tally.documents_in - tally.skipped.total()
    num_valid = splits.num_valid_documents(documents, config.valid_fraction, config.valid_min_documents)
    splits.check_source(config, config.input_jsonl[source], documents, num_valid)
    return splits.valid_threshold(documents, num_valid, config.split_seed, source)


def _copy_shard(
    folder: Path,
    number: int,
    in_valid: NDArray[np.bool_],
    dtype: np.dtype[Any],
    writers: tuple[_SplitWriter, _SplitWriter],
    tally: SourceTally,
) -> None:
    """Copy runs of documents that go to the same side, then remove the shard."""
    ids_path, lengths_path = shard_path(folder, number, "bin"), shard_path(folder, number, "lengths")
    lengths = np.fromfile(lengths_path, np.int32).reshape(-1, 2)
    if len(lengths):
        ids = np.memmap(ids_path, np.uint8, mode="r").data
        ends = np.cumsum(lengths[:, 0], dtype=np.int64) * dtype.itemsize
        assert len(in_valid) == len(lengths) and int(ends[-1]) == len(ids)
        edges = [0, *(np.flatnonzero(in_valid[1:] != in_valid[:-1]) + 1).tolist(), len(lengths)]
        for start, end in pairwise(edges):
            first_byte = int(ends[start - 1]) if start else 0
            writers[int(in_valid[start])].add(ids[first_byte : int(ends[end - 1])], lengths[start:end])
        tally.train.add(lengths[~in_valid])
        tally.valid.add(lengths[in_valid])
    ids_path.unlink()
    lengths_path.unlink()


def _let_appear(train: Path, valid: Path | None, paths: TokenPaths) -> None:
    """Sync everything, then rename; the manifest of an earlier run goes first, for it speaks of the earlier files."""
    pairs = [(path_of(train), path_of(paths.train)) for path_of in (bin_path, idx_path)]
    if valid:
        pairs += [(path_of(valid), path_of(paths.valid)) for path_of in (bin_path, idx_path)]
    for written, _ in pairs:
        with open(written, "rb") as file:
            os.fsync(file.fileno())
    paths.manifest.unlink(missing_ok=True)
    for path_of in (bin_path, idx_path):
        path_of(paths.valid).unlink(missing_ok=True)
    for written, final in pairs:
        os.replace(written, final)
    sync_folder(paths.manifest.parent)
