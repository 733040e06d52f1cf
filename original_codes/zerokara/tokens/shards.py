"""One worker's share of step 2: a task → a shard (ids, lengths, bad lines) in the work folder.

A shard is four files: ``<name>.bin`` ids of every document with its end of document, ``<name>.lengths`` int32 pairs
(ids, bytes of UTF-8 text) for each document, ``<name>.bad`` JSON lines for the quarantine, and ``<name>.json`` the
`ShardResult`, which is written last. How the corpus is cut into tasks does not show in the merged result.
"""

import hashlib
import os
import socket
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import orjson

from zerokara.base.durable import PARTIAL_SUFFIX
from zerokara.base.errors import RunError
from zerokara.base.resources import end_with_step
from zerokara.corpus.documents import BadLine, Document, Reason, TxtDocument, excerpt
from zerokara.corpus.read import Block, Range, read
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.fast_encoder import FastEncoder
from zerokara.tokenizer.model_file import SPACE_MARK
from zerokara.tokens.indexed import dtype_for

BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 20
ENDINGS = ("bin", "lengths", "bad")


@dataclass(frozen=True)
class ShardTask:
    """Consecutive ranges of one source, or a block of a compressed file, that become one shard."""

    name: str
    """``<index of the first file>-<start of its range or block>``."""
    source: int
    ranges: tuple[Range | Block, ...]


@dataclass(frozen=True)
class Job:
    """Settings that all tasks share."""

    encoder: Encoder | FastEncoder
    """Sent to the workers by pickling."""
    folder: Path
    text_field: str
    txt_document: TxtDocument
    is_synced: bool = False
    """True if a shard is synced before it counts as finished, since another machine relies on it."""


@dataclass(slots=True)
class RangeResult:
    lines: int = 0
    """Lines (documents), good and bad, from which the line numbers of later ranges follow."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of bad lines by reason."""
    damage: str = ""
    """The first `BadLine.damage` that is not empty."""
    lost_bytes: int = 0
    sha256: str = ""
    """SHA-256 of its whole file on a disk, if it is the first range of the file."""


@dataclass
class ShardResult:
    name: str
    """Name of its task."""
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    disk_bytes: int = 0
    """Bytes of the corpus that it was made from, for the progress bar."""
    next_start: int = 0
    """Byte at which the next block begins, after a block; 0 if none follows."""
    space_marks: int = 0
    """Documents with U+2581."""
    unknown: int = 0
    """Unknown tokens."""
    ranges: list[RangeResult] = field(default_factory=list)
    files: dict[str, list[int]] = field(default_factory=dict)
    """Size and CRC-32 of each of its files, by ending."""


def shard_path(folder: Path, name: str, ending: str) -> Path:
    """Path of one file of a shard; that of its result ends in ``json``."""
    return folder / f"{name}.{ending}"


def check_shard(folder: Path, result: ShardResult, ending: str, size: int, checksum: int) -> None:
    """Raise RunError if size or CRC-32 are not those that were written; the shard counts as unfinished then."""
    if [size, checksum] != [*result.files[ending]]:
        shard_path(folder, result.name, "json").unlink(missing_ok=True)
        rule = f"the shard {result.name} on the disk differs from what was written, as after a power cut"
        raise RunError(f"{rule}; it is removed. The same command makes it again")


def unfinished_path(path: Path) -> Path:
    """Name of a file while this process writes it; no other process uses it, on any machine."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}{PARTIAL_SUFFIX}")


class _ShardFile:
    """A file with the size and CRC-32 of what was written to it."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.bytes = self.checksum = 0

    def write(self, content: bytes) -> None:
        self.file.write(content)
        self.bytes += len(content)
        self.checksum = zlib.crc32(content, self.checksum)


_job: Job
"""That of this worker process, which `begin_worker` sets: its encoder is too large to be sent with each task."""


def begin_worker(job: Job) -> None:
    """Prepare a worker process, which ends as soon as the step is gone."""
    global _job
    _job = job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: there are as many workers as cores
    end_with_step()


def write_shard_in_worker(task: ShardTask) -> ShardResult:
    return write_shard(task, _job)


def write_shard(task: ShardTask, job: Job) -> ShardResult:
    # No other process uses these names: the orphan of a killed run may be working on the same task, here or elsewhere.
    paths = [shard_path(job.folder, task.name, ending) for ending in (*ENDINGS, "json")]
    result = ShardResult(task.name)
    with ExitStack() as stack:
        outputs = [_ShardFile(stack.enter_context(open(unfinished_path(path), "wb"))) for path in paths]
        for range_ in task.ranges:
            result.ranges.append(held := RangeResult())
            if range_.start == 0 and range_.file.remote is None:
                with open(range_.file.path, "rb") as file:
                    held.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            for batch in _batches(read(range_, job.text_field, job.txt_document)):
                _write_batch(job, result, outputs, *batch)
            result.disk_bytes += range_.disk_bytes
            if isinstance(range_, Block) and not range_.is_last:
                result.next_start = range_.start + len(range_.content) + (range_.last.bytes if range_.last else 0)
        for ending, output in zip(ENDINGS, outputs, strict=False):
            result.files[ending] = [output.bytes, output.checksum]
        outputs[-1].write(orjson.dumps(result))
        for output in outputs if job.is_synced else ():
            output.file.flush()
            os.fsync(output.file.fileno())
    for path in paths:
        os.replace(unfinished_path(path), path)
    return result


def _batches(items: Iterator[Document | BadLine]) -> Iterator[tuple[list[Document], list[BadLine]]]:
    documents, bad, characters = list[Document](), list[BadLine](), 0
    for item in items:
        if isinstance(item, Document):
            documents.append(item)
            characters += len(item.text)
        else:
            bad.append(item)
        if max(len(documents), len(bad)) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield documents, bad
            documents, bad, characters = [], [], 0
    if documents or bad:
        yield documents, bad


def _write_batch(
    job: Job, result: ShardResult, outputs: Sequence[_ShardFile], documents: list[Document], bad: list[BadLine]
) -> None:
    """Encode and count documents and bad lines of the last range, and write their ids, lengths and records."""
    number, held = len(result.ranges) - 1, result.ranges[-1]
    held.lines += len(documents) + sum(item.documents for item in bad)
    ids, text_bytes = job.encoder.encode_joined([document.text for document in documents])
    ends = np.flatnonzero(ids == np.int32(job.encoder.eos_id))
    if len(ends) != len(documents):
        raise RunError(f"the encoder gave {len(ends):,} ends for {len(documents):,} documents: a bug in zerokara")
    lengths = np.column_stack([np.diff(ends, prepend=-1), text_bytes]).astype(np.int32)
    marks = 1 + int(job.encoder.start_id >= 0)
    if (empty := lengths[:, 0] == marks).any():
        # Normalization can leave nothing of a text, as of zero-width spaces under nmt_nfkc.
        for document in (documents[each] for each in np.flatnonzero(empty).tolist()):
            shown = excerpt(document.text.encode("utf-8"))
            place = document.file, document.line, document.offset
            bad.append(BadLine(*place, Reason.NO_TOKENS, shown, document.bytes))
        bad.sort(key=lambda item: item.line)
        ids, lengths = np.delete(ids, (ends[empty, None] - np.arange(marks)).ravel()), lengths[~empty]
    outputs[0].write(ids.astype(dtype_for(job.encoder.vocab_size), copy=False).tobytes())
    outputs[1].write(lengths.tobytes())
    outputs[2].write(b"".join(_quarantined(item, number, held) for item in bad))
    result.documents += len(lengths)
    result.space_marks += sum(SPACE_MARK in document.text for document in documents)
    result.unknown += int(np.count_nonzero(ids == job.encoder.unk_id))
    result.tokens += len(ids)
    result.text_bytes += int(lengths[:, 1].sum(dtype=np.int64))


def _quarantined(item: BadLine, range_number: int, held: RangeResult) -> bytes:
    """Count a bad line; its record, in which the range stands for the file, and `line` is counted as in the item."""
    held.skipped[item.reason.value] += item.documents
    held.lost_bytes += item.lost_bytes
    record = {name: getattr(item, name) for name in ("line", "offset", "reason", "excerpt", "bytes")}
    held.damage = held.damage or item.damage
    if item.reason is Reason.DAMAGED:
        record |= {"documents": item.documents, "bytes_lost": item.lost_bytes}
    return orjson.dumps({**record, "range": range_number}, option=orjson.OPT_APPEND_NEWLINE)
