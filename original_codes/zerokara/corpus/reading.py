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

import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, overload

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
from zerokara.corpus.lines import BUFFER_BYTES, LineStream, OpenStreams
from zerokara.corpus.packed import PackedReader

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


@dataclass(frozen=True)
class Block:
    """Consecutive whole lines of a packed file, unpacked."""

    file: InputFile
    start: int
    """Byte of the unpacked stream at which the first line starts."""
    first_line: int
    """Number of that line in the file, from 1."""
    content: bytes
    last: BadLine | None
    """What follows the content and is no document: a line that is too long to be loaded, or the damage."""
    disk_bytes: int
    """Bytes on disk that were read for this block; those of all blocks add up to the file."""
    is_last: bool
    """Whether the file ends here."""


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


def blocks(file: InputFile, block_bytes: int) -> Iterator[Block]:
    """Unpack a file of lines block by block; each ends with the first line end at or after `block_bytes`.

    A line that is too long ends its block and is not loaded, so that a block holds `block_bytes` and a line at most.

    Raises:
        OSError: the file or the network fails; names the file.
        UserError: it was packed with more memory than is given to any.
    """
    limit = documents.MAX_LINE_BYTES
    with file.open(BUFFER_BYTES) as raw:
        packed = PackedReader(raw, file.packing, file.name)
        stream = io.BufferedReader(packed, BUFFER_BYTES)
        start, first_line, told, is_last = 0, 1, 0, False
        while not is_last:
            content = stream.read(block_bytes)
            whole = content.rfind(b"\n") + 1  # bytes of whole lines
            rest = b"" if whole == len(content) else stream.readline(limit + 1)
            size = len(content) - whole + len(rest)
            is_too_long, has_end = size > limit, whole == len(content) or rest.endswith(b"\n")
            while is_too_long and not has_end and (piece := stream.readline(BUFFER_BYTES)):
                size, has_end = size + len(piece), piece.endswith(b"\n")
            is_last = not stream.peek(1)
            disk_bytes = file.bytes - told if is_last else max(0, packed.packed_bytes - told)
            last = None
            if is_too_long or (packed.damage and not has_end):
                begin, content = content[whole:] + rest, content[:whole]
            elif rest:
                size, content = 0, content + rest
            end, next_line = start + len(content), first_line + content.count(b"\n")
            if is_last and packed.damage and not (is_too_long and has_end):
                lost, unverified = file.bytes - packed.damaged_at, packed.damaged_at - packed.unverified_from
                last = BadLine(file, next_line, end, Reason.DAMAGED, packed.damage, size, 1, max(0, lost), unverified)
            elif is_too_long:
                # Told next, in a block by itself, is a damage that follows.
                is_last = is_last and not packed.damage
                lost = disk_bytes * size // (len(content) + size)
                last = BadLine(file, next_line, end, Reason.TOO_LONG, excerpt(begin), size, lost_bytes=lost)
            yield Block(file, start, first_line, content, last, disk_bytes, is_last)
            told += disk_bytes
            start, first_line = (end + size, next_line + 1) if last else (end, next_line)


@overload
def read(part: Block, text_field: str = ..., txt_document: TxtDocument = ...) -> Iterator[Document | BadLine]: ...
@overload
def read(
    part: Range, text_field: str = ..., txt_document: TxtDocument = ..., streams: OpenStreams | None = ...
) -> RangeReader: ...
def read(
    part: Range | Block,
    text_field: str = "text",
    txt_document: TxtDocument = "file",
    streams: OpenStreams | None = None,
) -> RangeReader | Iterator[Document | BadLine]:
    """Iterate over the documents and bad lines of a range or a block, in order.

    Raises:
        OSError: from the iteration, when a file or the network fails; names the file.
    """
    if isinstance(part, Block):
        return _of_block(part, text_field)
    return RangeReader(part, text_field, txt_document, streams)


def _of_block(block: Block, text_field: str) -> Iterator[Document | BadLine]:
    yield from _of_lines(block.file, io.BytesIO(block.content), block.start, sys.maxsize, block.first_line, text_field)
    if block.last is not None:
        yield block.last


def _of_lines(
    file: InputFile, lines: IO[bytes], position: int, end: int, number: int, text_field: str
) -> Iterator[Document | BadLine]:
    """The items of the lines that start before `end`; the next is line `number`, at `position`."""
    readline, limit, is_json = lines.readline, documents.MAX_LINE_BYTES, file.format == "jsonl"
    new = tuple.__new__  # as Document(...), without its detour through Python
    while position < end:
        line = readline(limit + 1)
        size = len(line)
        if size > limit:
            piece = line
            while piece and not piece.endswith(b"\n"):
                piece = readline(BUFFER_BYTES)
                size += len(piece)
            yield BadLine(file, number, position, Reason.TOO_LONG, excerpt(line), size, lost_bytes=size)
        elif not line:
            return
        else:
            text = text_of_json(line, text_field) if is_json else text_of_line(line, position)
            if type(text) is str:  # and no Reason, which is a str of its own class
                yield new(Document, (text, file, number, position, size))
            else:
                yield BadLine(file, number, position, Reason(text), excerpt(line), size)
        number += 1
        position += size


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
