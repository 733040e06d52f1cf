"""One worker's share of step 2: consecutive ranges of the corpus → a shard (ids, lengths, bad lines) in the work
folder.

A shard is four files: ``<name>.bin`` ids of every document with its end of document, ``<name>.lengths`` int32 pairs
(ids, bytes of UTF-8 text) for each document, ``<name>.bad`` JSON lines of what was put aside, and ``<name>.json`` the
`ShardResult`, which is written last. How the corpus is cut into tasks does not show in the merged result.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from zerokara.corpus.reading import BadLine, Document, OpenStreams, RangeReader, Reason, TxtDocument, excerpt, read
from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import RunError
from zerokara.tokens.indexed import dtype_for
from zerokara.tokens.tasks import Task

BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 20
REPORT_SECONDS = 0.5
ENDINGS = ("bin", "lengths", "bad")
_CHUNK_BYTES = 1 << 20


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


@dataclass(frozen=True)
class Damage:
    """A place from which on a file or a row group could not be read."""

    range: int
    """Index of the range in the task."""
    what: str
    documents: int
    lost_bytes: int
    unverified_bytes: int
    """As in `BadLine`."""


@dataclass
class ShardResult:
    """Contents of a finished shard."""

    name: str
    """Name of its task."""
    documents: int = 0
    range_items: list[int] = field(default_factory=list)
    """Lines (documents) of each range, good and bad, from which the line numbers of later ranges follow."""
    range_bytes: list[int] = field(default_factory=list)
    """Bytes of the lines of each range, good and bad (unpacked)."""
    skipped_bytes: list[tuple[int, str, int]] = field(default_factory=list)
    """Bad lines: (index of the range, reason, unpacked bytes)."""
    damages: list[Damage] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of bad lines by reason."""
    at_end: bool = False
    """Whether the end of the last range's file was met in it or before it."""
    done: Tally = field(default_factory=Tally)
    """The work that it took, for the progress bar of a resumed run."""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size and CRC-32 of each of its files, by ending."""

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        damages = [asdict(damage) for damage in self.damages]
        return {**values, "skipped": dict(self.skipped), "damages": damages, "done": asdict(self.done)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ShardResult:
        """Restore a result from `as_json`."""
        files = {ending: (int(size), int(checksum)) for ending, (size, checksum) in values["files"].items()}
        restored = {"skipped": Counter(values["skipped"]), "done": Tally(**values["done"]), "files": files}
        skipped_bytes = [(int(number), str(reason), int(size)) for number, reason, size in values["skipped_bytes"]]
        damages = [Damage(**damage) for damage in values["damages"]]
        return cls(**{**values, **restored, "skipped_bytes": skipped_bytes, "damages": damages})


def shard_path(folder: Path, name: str, ending: str) -> Path:
    """Path of one file of a shard."""
    return folder / f"{name}.{ending}"


def result_path(folder: Path, name: str) -> Path:
    """Path of a shard's result."""
    return shard_path(folder, name, "json")


def is_whole(folder: Path, result: ShardResult) -> bool:
    """Whether the files of a shard have the sizes and checksums of its result."""
    for ending, (size, checksum) in result.files.items():
        path = shard_path(folder, result.name, ending)
        if not path.is_file() or path.stat().st_size != size:
            return False
        found = 0
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                found = zlib.crc32(chunk, found)
        if found != checksum:
            return False
    return set(result.files) == set(ENDINGS)


def write_shard(
    job: Job, task: Task, report: Callable[[Tally], None], streams: OpenStreams | None = None
) -> ShardResult:
    """Encode one task; `report` is called about twice a second with what was done since its last call."""
    # Temporary names hold the process id: the orphan of a killed run may be working on the same task.
    written = {ending: job.folder / f"{task.name}.{ending}.{os.getpid()}{PARTIAL_SUFFIX}" for ending in ENDINGS}
    result = ShardResult(task.name)
    with ExitStack() as stack:
        outputs = {ending: _Output(stack.enter_context(open(path, "wb"))) for ending, path in written.items()}
        writer = _ShardWriter(result, job.encoder, outputs, report)
        for number, range_ in enumerate(task.ranges):
            writer.add_range(number, read(range_, job.text_field, job.txt_document, streams))
        writer.report_now()
        result.files = {ending: (output.bytes, output.checksum) for ending, output in outputs.items()}
    for ending, path in written.items():
        os.replace(path, shard_path(job.folder, task.name, ending))
    unfinished = job.folder / f"{task.name}.json.{os.getpid()}{PARTIAL_SUFFIX}"
    unfinished.write_bytes(orjson.dumps(result.as_json()))
    os.replace(unfinished, result_path(job.folder, task.name))
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
        self._bad_bytes = Counter[str]()
        self._tally, self._last_report = Tally(), time.monotonic()

    def add_range(self, number: int, reader: RangeReader) -> None:
        items = item_bytes = read_bytes = 0
        for item in reader:
            item_bytes += item.bytes
            if isinstance(item, Document):
                items += 1
                self._documents.append(item)
                self._characters += len(item.text)
            else:
                items += item.documents
                self._bad.append(item)
            full = len(self._documents) >= BATCH_DOCUMENTS or self._characters >= BATCH_CHARACTERS
            if full or len(self._bad) >= BATCH_DOCUMENTS:
                self._flush(number)
                self._tally.file_bytes += reader.disk_bytes - read_bytes
                read_bytes = reader.disk_bytes
        self._flush(number)
        self._tally.file_bytes += reader.disk_bytes - read_bytes
        self.result.range_items.append(items)
        self.result.range_bytes.append(item_bytes)
        self.result.skipped_bytes += [(number, reason, size) for reason, size in self._bad_bytes.items()]
        self._bad_bytes.clear()
        self.result.at_end = reader.at_end

    def report_now(self) -> None:
        self.result.done.add(self._tally)
        self._report(self._tally)
        self._tally, self._last_report = Tally(), time.monotonic()

    def _flush(self, range_number: int) -> None:
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
        for item in bad:
            self.result.skipped[item.reason.value] += item.documents
            self._bad_bytes[item.reason.value] += item.bytes
            if item.reason is Reason.DAMAGED:
                counts = (item.documents, item.lost_bytes, item.unverified_bytes)
                self.result.damages.append(Damage(range_number, item.excerpt, *counts))
            self._outputs["bad"].write(_bad_record(range_number, item))
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


def _bad_record(range_number: int, item: BadLine) -> bytes:
    record: dict[str, Any] = {
        "range": range_number,
        "line": item.line,
        "offset": item.offset,
        "reason": item.reason.value,
        "excerpt": item.excerpt,
        "bytes": item.bytes,
    }
    if item.reason is Reason.DAMAGED:
        record |= {"documents": item.documents, "bytes_lost": item.lost_bytes}
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
