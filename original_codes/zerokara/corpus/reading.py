"""Ranges of corpus files → documents and bad lines, streaming, in constant memory; the one reader of all steps.

A plain file whose documents are lines is cut into byte ranges, and a range owns every line that *starts* in it, so
that ranges of any size cover each line once. A packed file can be cut in the same way by bytes of its unpacked
stream, one range after another until a reader is `at_end`, since its length is unknown beforehand (see
`has_unknown_size` and `OpenStreams`). A .parquet is cut by its row groups. A .txt file that is one document is read
whole.

Every line gives exactly one item, so the number of items is the number of lines, and the items' bytes add up to the
(unpacked) file. A damaged packed file gives what can be read, then one item that tells the damage: the line in which it
breaks off, or one more. In a .parquet every row gives one item, and a damaged row group one for all the rows that
cannot be read, which says how many.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerokara.corpus import documents
from zerokara.corpus.documents import (
    BadLine,
    Document,
    Reason,
    TxtDocument,
    excerpt,
    text_of_file,
    text_of_json,
    text_of_line,
)
from zerokara.corpus.inputs import InputFile
from zerokara.corpus.lines import LineStream, OpenStreams

if TYPE_CHECKING:
    from zerokara.corpus.tables import RowGroup

MAX_REMOTE_FOOTERS = 64
"""More .parquet files than this on the Hub are read whole: to cut one takes some tenths of a second for its footer."""


@dataclass(frozen=True)
class Range:
    """A part of a file: the lines that start at `start` or later and before `end`, or row groups of a .parquet.

    The unit is a byte of a plain file, a byte of the unpacked stream of a packed one, a row group of a .parquet.
    """

    file: InputFile
    start: int = 0
    end: int | None = None
    """None: to the end of the file."""
    row_group_bytes: int | None = None
    """Bytes on disk of the row groups of this range, where they were counted."""

    @property
    def bytes(self) -> int:
        """Bytes on disk; 0 if unknown beforehand."""
        if self.row_group_bytes is not None:
            return self.row_group_bytes
        if self.file.packing == "none" and self.file.format != "parquet":
            return (self.file.bytes if self.end is None else self.end) - self.start
        return self.file.bytes if self.start == 0 and self.end is None else 0


def is_one_document(file: InputFile, txt_document: TxtDocument) -> bool:
    """Whether the file is one document."""
    return file.format == "txt" and txt_document == "file"


def has_unknown_size(file: InputFile, txt_document: TxtDocument) -> bool:
    """Whether the file is packed and consists of lines: its unpacked size is unknown until it is read."""
    return file.is_packed and not is_one_document(file, txt_document)


def ranges(files: Sequence[InputFile], target_bytes: int, txt_document: TxtDocument = "file") -> list[Range]:
    """Cut files into ranges of about `target_bytes`, in corpus order; those that cannot be cut stay whole.

    Raises:
        OSError: the footer of a .parquet cannot be read from the disk or the network.
    """
    cut: list[Range] = []
    far = sum(file.format == "parquet" and file.remote is not None for file in files) > MAX_REMOTE_FOOTERS
    for file in files:
        whole = file.is_packed or is_one_document(file, txt_document) or (far and file.format == "parquet")
        if whole or file.bytes <= target_bytes:
            cut.append(Range(file))
        elif file.format == "parquet":
            from zerokara.corpus import tables  # pyarrow: only where there is such a file

            parts = tables.gathered_row_groups(file, target_bytes)
            cut.extend(Range(file, start, end, size) for start, end, size in parts)
        else:
            starts = range(0, file.bytes, max(1, target_bytes))
            cut.extend(Range(file, start, min(start + starts.step, file.bytes)) for start in starts)
    return cut


def read(
    range_: Range, text_field: str = "text", txt_document: TxtDocument = "file", streams: OpenStreams | None = None
) -> RangeReader:
    """Iterate over the documents and bad lines of a range, in order; `streams` keeps packed files open in between.

    Raises:
        OSError: from the iteration, when a file or the network fails; names the file.
    """
    return RangeReader(range_, text_field, txt_document, streams)


class RangeReader:
    """The items of one range, to be iterated over once."""

    def __init__(self, range_: Range, text_field: str, txt_document: TxtDocument, streams: OpenStreams | None):
        self.range, self.text_field, self.txt_document = range_, text_field, txt_document
        self.at_end = False
        """After the iteration: whether the end of the file was met in this range or lies before it."""
        self._streams = streams
        self._stream: LineStream | None = None
        self._group: RowGroup | None = None
        self._disk_start = self._disk_bytes = 0

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk that were read for this range so far, without what was skipped to reach it."""
        if self._stream is not None:
            return max(0, self._stream.disk_position - self._disk_start)
        return self._disk_bytes + (self._group.read_bytes if self._group else 0)

    def __iter__(self) -> Iterator[Document | BadLine]:
        if self.range.file.format == "parquet":
            return self._rows()
        return self._whole_file() if is_one_document(self.range.file, self.txt_document) else self._lines()

    def _rows(self) -> Iterator[Document | BadLine]:
        from zerokara.corpus import tables  # pyarrow: only where there is such a file

        file = self.range.file
        try:
            for group in tables.row_groups(file, self.range.start, self.range.end, self.text_field):
                self._group = group
                yield from group
                self._group = None
                self._disk_bytes += group.disk_bytes
                self.at_end = group.is_last
        except tables.Damaged as damage:  # of nobody knows how many rows
            self._disk_bytes = file.bytes
            yield BadLine(file, 1, 0, Reason.DAMAGED, str(damage), lost_bytes=file.bytes)
            self.at_end = True
        self.at_end = self.at_end or self.range.end is None

    def _lines(self) -> Iterator[Document | BadLine]:
        file, start, end = self.range.file, self.range.start, self.range.end
        stream = self._streams.take(file, start) if self._streams else None
        stream = stream or LineStream(file)
        finished = False
        try:
            stream.go_to(start, end)
            self._disk_start = start if file.packing == "none" else stream.disk_position
            self._stream = stream
            yield from self._items_of(stream)
            if end is None:
                stream.ended = True
            else:
                stream.free_from = max(stream.free_from, end)
            finished = True
        finally:
            self._stream = None
            self._disk_bytes = max(0, stream.disk_position - self._disk_start)
            if finished and self._streams and file.is_packed:
                self._streams.keep(stream)
            else:
                stream.close()
        self.at_end = stream.ended
        if file.packing == "none":
            self._disk_bytes = self.range.bytes
            self.at_end = end is None or end >= file.bytes

    def _items_of(self, stream: LineStream) -> Iterator[Document | BadLine]:
        """The items from the stream's position, which is always right after the item that was yielded last."""
        file, text_field, is_json = self.range.file, self.text_field, self.range.file.format == "jsonl"
        end = sys.maxsize if self.range.end is None else self.range.end
        readline, limit = stream.bytes.readline, documents.MAX_LINE_BYTES
        number, position = 0, stream.position
        new = tuple.__new__  # as Document(...), without its detour through Python
        while position < end and not stream.ended:
            line = readline(limit + 1)
            number += 1
            start, position = position, position + len(line)
            stream.position = position
            unfinished = not line.endswith(b"\n")
            if len(line) > limit:
                unfinished = unfinished and not stream.skip_line()
                position = stream.position
                if not (unfinished and stream.damage):
                    yield BadLine(file, number, start, Reason.TOO_LONG, excerpt(line), position - start)
                    continue
            if unfinished:
                stream.ended = True
                if stream.damage:
                    yield _damaged(stream, number, start, position - start)
                    return
                if not line:
                    return
            text = text_of_json(line, text_field) if is_json else text_of_line(line, start)
            if type(text) is str:  # and no Reason, which is a str of its own class
                yield new(Document, (text, file, number, start, len(line)))
            else:
                yield BadLine(file, number, start, Reason(text), excerpt(line), len(line))

    def _whole_file(self) -> Iterator[Document | BadLine]:
        yield self._whole_item(self.range.file, documents.MAX_LINE_BYTES)
        self.at_end, self._disk_bytes = True, self.range.file.bytes

    @staticmethod
    def _whole_item(file: InputFile, limit: int) -> Document | BadLine:
        stream = LineStream(file)
        try:
            content = stream.bytes.read(limit + 1)
            if len(content) > limit:
                # The file is this one item, so any size stands for all of a packed file.
                size = len(content) if file.is_packed else file.bytes
                return BadLine(file, 1, 0, Reason.TOO_LONG, excerpt(content), size)
            if stream.damage:
                return _damaged(stream, 1, 0, len(content))
        finally:
            stream.close()
        text = text_of_file(content)
        if isinstance(text, tuple):
            reason, offset = text
            return BadLine(file, 1, offset, reason, excerpt(content[offset:]), len(content))
        return Document(text, file, 1, 0, len(content))


def _damaged(stream: LineStream, line: int, start: int, size: int) -> BadLine:
    """The item for the damage of a packed file; `size` is the size of the truncated line."""
    lost, unverified = stream.lost_bytes, stream.unverified_bytes
    return BadLine(stream.file, line, start, Reason.DAMAGED, stream.damage, size, 1, lost, unverified)
