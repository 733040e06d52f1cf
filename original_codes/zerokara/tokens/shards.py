"""One worker's share of step 2: a task → a shard (ids, lengths, bad lines) in the work folder.

A shard is four files: ``<name>.bin`` ids of every document with its end of document, ``<name>.lengths`` int32 pairs
(ids, bytes of UTF-8 text) for each document, ``<name>.bad`` JSON lines for the quarantine, and ``<name>.json`` the
`ShardResult`, which is written last. How the corpus is cut into tasks does not show in the merged result.
"""

from __future__ import annotations

import hashlib
import os
import socket
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import orjson
import psutil
from numpy.typing import NDArray

from zerokara.corpus.documents import BadLine, Document, Reason, TxtDocument, excerpt
from zerokara.corpus.read import Block, Range, read
from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import RunError
from zerokara.tokens.indexed import dtype_for
from zerokara.tokens.tasks import Task

BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 20
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
    encoder_name: str = ""
    is_synced: bool = False
    """Whether a shard is on the disk before it counts as finished: another machine is told of it."""


@dataclass(slots=True)
class RangeResult:
    """What one range or block held."""

    lines: int = 0
    """Lines (documents), good and bad, from which the line numbers of later ranges follow."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of bad lines by reason."""
    damage: str = ""
    """The first place from which on a file or a row group could not be read."""
    lost_documents: int = 0
    """Known to be missing where it is damaged."""
    lost_bytes: int = 0
    """Bytes on disk that could not be read or belong to a line that is too long."""
    unverified_bytes: int = 0
    """As in `BadLine`."""
    sha256: str = ""
    """Of its whole file on a disk, where it is the first of the file."""


@dataclass
class ShardResult:
    """Contents of a finished shard."""

    name: str
    """Name of its task."""
    encoder_name: str = ""
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    disk_bytes: int = 0
    """Bytes of the corpus that it was made from, for the progress bar."""
    next_start: int = 0
    """Of a block: where the next begins; 0 if none follows."""
    ranges: list[RangeResult] = field(default_factory=list)
    files: dict[str, list[int]] = field(default_factory=dict)
    """Size and CRC-32 of each of its files, by ending."""


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


def write_shard(job: Job, task: Task) -> ShardResult:
    """Encode one task."""
    # Under a name of its own: the orphan of a killed run may be working on the same task, here or elsewhere.
    paths = [shard_path(job.folder, task.name, ending) for ending in (*ENDINGS, "json")]
    result = ShardResult(task.name, job.encoder_name)
    with ExitStack() as stack:
        *outputs, record = [_Output(stack.enter_context(open(unfinished_path(path), "wb"))) for path in paths]
        writer = _ShardWriter(result, job.encoder, *outputs)
        for part in task.parts:
            writer.add(part, job)
        result.files = {
            ending: [output.bytes, output.checksum] for ending, output in zip(ENDINGS, outputs, strict=True)
        }
        record.write(orjson.dumps(result))
        if job.is_synced:
            for output in (*outputs, record):
                output.sync()
    for path in paths:
        os.replace(unfinished_path(path), path)
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

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


class _ShardWriter:
    """Collects documents into batches, encodes and writes them."""

    def __init__(self, result: ShardResult, encoder: TextEncoder, ids: _Output, lengths: _Output, bad: _Output):
        self.result = result
        self._encoder, self._ids, self._lengths, self._bad_lines = encoder, ids, lengths, bad
        self._dtype: np.dtype[Any] = dtype_for(encoder.vocab_size)
        self._eos = np.int32(encoder.eos_id)
        self._documents: list[Document] = []
        self._bad: list[BadLine] = []

    def add(self, part: Range | Block, job: Job) -> None:
        """Write what a range or a block holds."""
        self.result.ranges.append(held := RangeResult())
        if part.start == 0 and part.file.remote is None:
            with open(part.file.path, "rb") as file:
                held.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        characters = 0
        for item in read(part, job.text_field, job.txt_document):
            if isinstance(item, Document):
                held.lines += 1
                self._documents.append(item)
                characters += len(item.text)
            else:
                held.lines += item.documents
                self._bad.append(item)
            full = len(self._documents) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS
            if full or len(self._bad) >= BATCH_DOCUMENTS:
                self._flush(held)
                characters = 0
        self._flush(held)
        if isinstance(part, Range):
            self.result.disk_bytes += part.disk_bytes
        else:
            self.result.disk_bytes += part.disk_bytes
            end = part.start + len(part.content) + (part.last.bytes if part.last else 0)
            self.result.next_start = 0 if part.is_last else end

    def _flush(self, held: RangeResult) -> None:
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
            self._ids.write(ids.astype(self._dtype, copy=False).data.cast("B"))
            self._lengths.write(lengths.data.cast("B"))
            self.result.documents += len(lengths)
            self.result.tokens += len(ids)
            self.result.text_bytes += int(lengths[:, 1].sum(dtype=np.int64))
        for item in bad:
            held.skipped[item.reason.value] += item.documents
            held.lost_bytes += item.lost_bytes
            held.unverified_bytes += item.unverified_bytes
            record = {name: getattr(item, name) for name in ("line", "offset", "reason", "excerpt", "bytes")}
            if item.reason is Reason.DAMAGED:
                held.damage = held.damage or item.excerpt
                held.lost_documents += item.documents
                record |= {"documents": item.documents, "bytes_lost": item.lost_bytes}
            record["range"] = len(self.result.ranges) - 1  # for the file; its lines are counted as in the item
            self._bad_lines.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        self._documents, self._bad = [], []

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
