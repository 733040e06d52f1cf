"""One worker's share of step 2: consecutive byte ranges → a shard (ids, lengths, bad lines) in the work folder.

A shard is three files: ``N.bin`` ids of every document with its end of document, ``N.lengths`` int32 pairs (ids,
bytes of UTF-8 text) for each document, and ``N.bad`` JSON lines of what was put aside. Nothing but a `ShardResult`
goes back to the parent. How the corpus is cut into tasks does not show in the merged result.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from zerokara.corpus.reading import BadLine, ByteRange, Document, RangeReader, Reason, TxtDocument, excerpt, read
from zerokara.tokens.indexed import dtype_for

BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 20
REPORT_SECONDS = 0.5


class TextEncoder(Protocol):
    """What step 2 needs of a tokenizer."""

    vocab_size: int
    eos_id: int

    def encode_many(self, texts: Iterable[str]) -> Sequence[NDArray[np.int32]]:
        """The ids of each document, without an end-of-document id."""
        ...


@dataclass(frozen=True)
class Job:
    """What every worker knows from the start."""

    open_encoder: Callable[[], TextEncoder]
    folder: Path
    text_field: str
    txt_document: TxtDocument


@dataclass(frozen=True)
class Task:
    """Consecutive ranges of one source that become one shard."""

    number: int
    source: int
    ranges: tuple[ByteRange, ...]

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return sum(range_.bytes for range_ in self.ranges)


@dataclass
class Tally:
    """What has been done since the last report."""

    file_bytes: int = 0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0


@dataclass
class ShardResult:
    """What a finished shard holds."""

    number: int
    documents: int = 0
    range_items: list[int] = field(default_factory=list)
    """Lines (items) of each range, good and bad: the line numbers of a file's later ranges follow from them."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Lines that are no documents, by reason."""


def shard_path(folder: Path, number: int, ending: str) -> Path:
    """The name of one file of a shard."""
    return folder / f"{number:06d}.{ending}"


def write_shard(job: Job, task: Task, encoder: TextEncoder, report: Callable[[Tally], None]) -> ShardResult:
    """Encode one task; `report` is called now and then with what was done since its last call."""
    with (
        open(shard_path(job.folder, task.number, "bin"), "wb") as ids_file,
        open(shard_path(job.folder, task.number, "lengths"), "wb") as lengths_file,
        open(shard_path(job.folder, task.number, "bad"), "wb") as bad_file,
    ):
        writer = _ShardWriter(task.number, encoder, ids_file, lengths_file, bad_file, report)
        for number, range_ in enumerate(task.ranges):
            writer.add_range(number, read(range_, job.text_field, job.txt_document))
        writer.report_now()
    return writer.result


class _ShardWriter:
    def __init__(
        self,
        number: int,
        encoder: TextEncoder,
        ids_file: IO[bytes],
        lengths_file: IO[bytes],
        bad_file: IO[bytes],
        report: Callable[[Tally], None],
    ):
        self.result = ShardResult(number)
        self._encoder, self._report = encoder, report
        self._ids_file, self._lengths_file, self._bad_file = ids_file, lengths_file, bad_file
        self._dtype: np.dtype[Any] = dtype_for(encoder.vocab_size)
        self._eos = np.int32(encoder.eos_id).tobytes()
        self._documents: list[Document] = []
        self._characters = 0
        self._bad: list[BadLine] = []
        self._tally, self._last_report = Tally(), time.monotonic()

    def add_range(self, number: int, reader: RangeReader) -> None:
        items, position = 0, reader.position
        for item in reader:
            items += 1
            if isinstance(item, Document):
                self._documents.append(item)
                self._characters += len(item.text)
            else:
                self._bad.append(item)
            full = len(self._documents) >= BATCH_DOCUMENTS or self._characters >= BATCH_CHARACTERS
            if full or len(self._bad) >= BATCH_DOCUMENTS:
                self._flush(number)
                self._tally.file_bytes += reader.position - position
                position = reader.position
        self._flush(number)
        self._tally.file_bytes += reader.position - position
        self.result.range_items.append(items)

    def report_now(self) -> None:
        self._report(self._tally)
        self._tally, self._last_report = Tally(), time.monotonic()

    def _flush(self, range_number: int) -> None:
        """Encode the batch and write it; a batch never goes beyond its range."""
        documents, bad = self._documents, self._bad
        encoded = self._encoder.encode_many([document.text for document in documents]) if documents else []
        if any(len(ids) == 0 for ids in encoded):
            bad.extend(_without_tokens(doc) for doc, ids in zip(documents, encoded, strict=True) if len(ids) == 0)
            bad.sort(key=lambda item: item.line)
            documents = [doc for doc, ids in zip(documents, encoded, strict=True) if len(ids)]
            encoded = [ids for ids in encoded if len(ids)]
        if documents:
            joined = np.frombuffer(self._eos.join([*(ids.data for ids in encoded), b""]), dtype=np.int32)
            self._ids_file.write(np.ascontiguousarray(joined, dtype=self._dtype).data)
            lengths = np.empty((len(documents), 2), dtype=np.int32)
            lengths[:, 0] = [len(ids) + 1 for ids in encoded]
            lengths[:, 1] = [_utf8_bytes(document.text) for document in documents]
            self._lengths_file.write(lengths.data)
            self.result.documents += len(documents)
            self._tally.documents += len(documents)
            self._tally.tokens += len(joined)
            self._tally.text_bytes += int(lengths[:, 1].sum())
        for item in bad:
            self.result.skipped[item.reason.value] += 1
            self._bad_file.write(_bad_record(range_number, item))
        self._documents, self._characters, self._bad = [], 0, []
        if time.monotonic() - self._last_report > REPORT_SECONDS:
            self.report_now()


def _without_tokens(document: Document) -> BadLine:
    # Texts that normalisation leaves nothing of, such as zero-width spaces under nmt_nfkc.
    shown = excerpt(document.text.encode("utf-8"))
    return BadLine(document.file, document.line, document.offset, Reason.NO_TOKENS, shown)


def _bad_record(range_number: int, item: BadLine) -> bytes:
    record = {
        "range": range_number,
        "line": item.line,
        "offset": item.offset,
        "reason": item.reason.value,
        "excerpt": item.excerpt,
    }
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))
