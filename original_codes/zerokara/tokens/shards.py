"""One worker's share of step 2: consecutive ranges of the corpus → a shard (ids, lengths, bad lines) in the work
folder.

A shard is four files: ``<name>.bin`` ids of every document with its end of document, ``<name>.lengths`` int32 pairs
(ids, bytes of UTF-8 text) for each document, ``<name>.bad`` JSON lines for the `quarantine`, and ``<name>.json`` the
`ShardResult`, which is written last. How the corpus is cut into tasks does not show in the merged result.
"""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import orjson
import psutil
from numpy.typing import NDArray

from zerokara.corpus.documents import BadLine, Document, Reason, TxtDocument, excerpt
from zerokara.corpus.lines import OpenStreams, RangeReader, read
from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import RunError
from zerokara.tokens import quarantine
from zerokara.tokens.indexed import dtype_for
from zerokara.tokens.tasks import Task

BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 20
REPORT_SECONDS = 0.5
ENDINGS = ("bin", "lengths", "bad")


class TextEncoder(Protocol):
    """What step 2 needs of a tokenizer."""

    vocab_size: int
    eos_id: int

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], list[int]]:
        """The ids of documents one after another, each with its end; the bytes of UTF-8 text of each."""
        ...


@dataclass(frozen=True)
class Job:
    """What is the same for every task."""

    encoder: TextEncoder
    """Sent to the workers by pickling."""
    folder: Path
    text_field: str
    txt_document: TxtDocument
    is_synced: bool = False
    """Whether a shard is on the disk before it counts as finished: another machine is told of it."""


@dataclass
class Tally:
    """What has been done since the last report."""

    file_bytes: int = 0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0

    def add(self, other: Tally) -> None:
        """Add what another tally counted."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(frozen=True, slots=True)
class Damage:
    """A place from which on a file or a row group could not be read."""

    what: str
    documents: int
    lost_bytes: int
    unverified_bytes: int
    """As in `BadLine`."""


@dataclass(slots=True)
class RangeResult:
    """What one range held."""

    lines: int = 0
    """Lines (documents), good and bad, from which the line numbers of later ranges follow."""
    bytes: int = 0
    """Their bytes (unpacked)."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of bad lines by reason."""
    skipped_bytes: Counter[str] = field(default_factory=Counter)
    """Their bytes (unpacked)."""
    damages: list[Damage] = field(default_factory=list)


@dataclass
class ShardResult:
    """Contents of a finished shard."""

    name: str
    """Name of its task."""
    documents: int = 0
    ranges: list[RangeResult] = field(default_factory=list)
    at_end: bool = False
    """Whether the end of the last range's file was met in it or before it."""
    done: Tally = field(default_factory=Tally)
    """The work that it took, for the progress bar of a resumed run."""
    files: dict[str, list[int]] = field(default_factory=dict)
    """Size and CRC-32 of each of its files, by ending."""

    @property
    def num_lines(self) -> list[int]:
        """Lines of each range."""
        return [held.lines for held in self.ranges]

    @classmethod
    def read(cls, path: Path) -> ShardResult:
        """Restore a result from its file.

        Raises:
            ValueError, TypeError, KeyError: it is damaged.
        """
        values = orjson.loads(path.read_bytes())
        ranges = [_range_result(**of_range) for of_range in values["ranges"]]
        return cls(**{**values, "ranges": ranges, "done": Tally(**values["done"])})


def _range_result(**values: Any) -> RangeResult:
    counters = {name: Counter(values[name]) for name in ("skipped", "skipped_bytes")}
    return RangeResult(**values | counters | {"damages": [Damage(**damage) for damage in values["damages"]]})


def shard_path(folder: Path, name: str, ending: str) -> Path:
    """Path of one file of a shard; that of its result ends in ``json``."""
    return folder / f"{name}.{ending}"


def unfinished_path(path: Path) -> Path:
    """The name of a file while this process writes it, which no other has, on any machine."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}{PARTIAL_SUFFIX}")


def is_left_here(path: Path) -> bool:
    """Whether an unfinished file is of a process of this machine that has ended, or of this process."""
    name, _, pid = path.name.removesuffix(PARTIAL_SUFFIX).rpartition(".")
    if not name.endswith(f".{socket.gethostname()}") or not pid.isdecimal():
        return False
    return int(pid) == os.getpid() or not psutil.pid_exists(int(pid))


def write_shard(
    job: Job, task: Task, report: Callable[[Tally], None], streams: OpenStreams | None = None
) -> ShardResult:
    """Encode one task; `report` is called about twice a second with what was done since its last call."""
    # Under a name of its own: the orphan of a killed run may be working on the same task, here or elsewhere.
    written = {ending: unfinished_path(shard_path(job.folder, task.name, ending)) for ending in ENDINGS}
    result = ShardResult(task.name)
    with ExitStack() as stack:
        files = {ending: stack.enter_context(open(path, "wb")) for ending, path in written.items()}
        outputs = {ending: _Output(file) for ending, file in files.items()}
        writer = _ShardWriter(result, job.encoder, outputs, report)
        for range_ in task.ranges:
            writer.add_range(read(range_, job.text_field, job.txt_document, streams))
        writer.report_now()
        result.files = {ending: [output.bytes, output.checksum] for ending, output in outputs.items()}
        if job.is_synced:
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
    for ending, path in written.items():
        os.replace(path, shard_path(job.folder, task.name, ending))
    place = shard_path(job.folder, task.name, "json")
    unfinished = unfinished_path(place)
    with open(unfinished, "wb") as file:
        file.write(orjson.dumps(result))
        if job.is_synced:
            file.flush()
            os.fsync(file.fileno())
    os.replace(unfinished, place)
    return result


class _Output:
    """A file with the size and CRC-32 of what was written to it."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.bytes = self.checksum = 0

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self.bytes += memoryview(content).nbytes
        self.checksum = zlib.crc32(content, self.checksum)


class _ShardWriter:
    """Collects documents into batches, encodes and writes them."""

    def __init__(
        self, result: ShardResult, encoder: TextEncoder, outputs: dict[str, _Output], report: Callable[[Tally], None]
    ):
        self.result = result
        self._encoder, self._outputs, self._report = encoder, outputs, report
        self._dtype: np.dtype[Any] = dtype_for(encoder.vocab_size)
        self._eos = np.int32(encoder.eos_id)
        self._documents: list[Document] = []
        self._characters = 0
        self._bad: list[BadLine] = []
        self._tally, self._last_report = Tally(), time.monotonic()

    def add_range(self, reader: RangeReader) -> None:
        lines = line_bytes = read_bytes = 0
        self.result.ranges.append(RangeResult())
        for item in reader:
            line_bytes += item.bytes
            if isinstance(item, Document):
                lines += 1
                self._documents.append(item)
                self._characters += len(item.text)
            else:
                lines += item.documents
                self._bad.append(item)
            full = len(self._documents) >= BATCH_DOCUMENTS or self._characters >= BATCH_CHARACTERS
            if full or len(self._bad) >= BATCH_DOCUMENTS:
                self._flush()
                self._tally.file_bytes += reader.disk_bytes - read_bytes
                read_bytes = reader.disk_bytes
        self._flush()
        self._tally.file_bytes += reader.disk_bytes - read_bytes
        self.result.ranges[-1].lines, self.result.ranges[-1].bytes = lines, line_bytes
        self.result.at_end = reader.at_end

    def report_now(self) -> None:
        self.result.done.add(self._tally)
        self._report(self._tally)
        self._tally, self._last_report = Tally(), time.monotonic()

    def _flush(self) -> None:
        """Encode the batch and write it; a batch never spans two ranges."""
        documents, bad = self._documents, self._bad
        if documents:
            ids, lengths = self._encoded(documents)
            empty = lengths[:, 0] == 1
            if empty.any():
                bad.extend(_without_tokens(documents[i]) for i in np.flatnonzero(empty).tolist())
                bad.sort(key=lambda item: item.line)
                ids = np.delete(ids, np.cumsum(lengths[:, 0])[empty] - 1)
                lengths = np.ascontiguousarray(lengths[~empty])
            self._outputs["bin"].write(ids.astype(self._dtype, copy=False).data.cast("B"))
            self._outputs["lengths"].write(lengths.data.cast("B"))
            self.result.documents += len(lengths)
            self._tally.documents += len(lengths)
            self._tally.tokens += len(ids)
            self._tally.text_bytes += int(lengths[:, 1].sum(dtype=np.int64))
        held, range_number = self.result.ranges[-1], len(self.result.ranges) - 1
        for item in bad:
            held.skipped[item.reason.value] += item.documents
            held.skipped_bytes[item.reason.value] += item.bytes
            if item.reason is Reason.DAMAGED:
                held.damages.append(Damage(item.excerpt, item.documents, item.lost_bytes, item.unverified_bytes))
            self._outputs["bad"].write(quarantine.record(range_number, item))
        self._documents, self._characters, self._bad = [], 0, []
        if time.monotonic() - self._last_report > REPORT_SECONDS:
            self.report_now()

    def _encoded(self, documents: list[Document]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids of the documents with their end-of-document ids, and int32[documents, 2] of (ids, bytes of text)."""
        ids, text_bytes = self._encoder.encode_joined([document.text for document in documents])
        ends = np.flatnonzero(ids == self._eos)
        if len(ends) != len(documents):
            raise RunError(f"the encoder gave {len(ends):,} ends for {len(documents):,} documents: a bug in zerokara")
        lengths = np.empty((len(documents), 2), dtype=np.int32)
        lengths[:, 0] = np.diff(ends, prepend=-1)
        lengths[:, 1] = text_bytes
        return ids, lengths


def _without_tokens(document: Document) -> BadLine:
    # Normalization can leave nothing of a text, as of zero-width spaces under nmt_nfkc.
    shown = excerpt(document.text.encode("utf-8"))
    return BadLine(document.file, document.line, document.offset, Reason.NO_TOKENS, shown, document.bytes)
