"""A plain or packed file as a stream of lines that knows its position, and the cache that keeps such a stream open.

Positions are bytes of the unpacked stream. To read range after range of a packed file, pass the same `OpenStreams` to
each reading: the next range continues where the last one ended, instead of unpacking everything before it again.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import IO

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
from zerokara.corpus.find import InputFile
from zerokara.corpus.packed import PackedReader
from zerokara.corpus.read import Range, is_one_document

BUFFER_BYTES = 1024 * 1024


class LineStream:
    """The lines of one file, with the current position."""

    def __init__(self, file: InputFile):
        self.file = file
        self._raw = file.open(BUFFER_BYTES)
        self._packed = None if file.packing == "none" else PackedReader(self._raw, file.packing, file.name)
        self.bytes: IO[bytes] = self._raw if self._packed is None else io.BufferedReader(self._packed, BUFFER_BYTES)
        self.position = 0
        """The next byte to be read: the start of a line unless `inside_line`."""
        self.inside_line = False
        self.free_from = 0
        """No line starts from here up to `position`."""
        self.ended = False
        """Whether the end was met."""

    @property
    def damage(self) -> str:
        """Why a packed stream ends early, or empty; known as soon as the buffer reaches that place."""
        return self._packed.damage if self._packed else ""

    @property
    def lost_bytes(self) -> int:
        """Bytes on disk that cannot be read: those from the damage on."""
        return max(0, self.file.bytes - self._packed.damaged_at) if self._packed and self._packed.damage else 0

    @property
    def unverified_bytes(self) -> int:
        """Bytes on disk that were read before a damage but may be wrong or incomplete."""
        return self._packed.damaged_at - self._packed.unverified_from if self._packed else 0

    @property
    def disk_position(self) -> int:
        """Position in the file on disk; its end if the rest is unreadable."""
        if self._packed is None:
            return self.position
        return self.file.bytes if self.ended and self._packed.damage else self._packed.packed_bytes

    def go_to(self, start: int, end: int | None) -> None:
        """Go to the first line that starts at `start` or later; in a plain file not far beyond `end`.

        A packed stream is kept open for the next range, so nothing is read twice; a plain file is not, and each of its
        ranges inside one very long line would read that line to its end.
        """
        if self._packed is not None:
            end = None
        if self.position < start:
            # One byte before: if it is a line's last, the next line is the first of the range.
            self._skip(start - 1 - self.position)
            self.inside_line = True
        while self.inside_line and not self.ended and (end is None or self.position < end):
            self._read_on()

    def skip_line(self) -> bool:
        """Skip the rest of the line; return whether it had an end."""
        self.inside_line = True
        while self.inside_line and not self.ended:
            self._read_on()
        return not self.ended

    def close(self) -> None:
        """Close the file."""
        self.bytes.close()
        self._raw.close()

    def _read_on(self) -> None:
        piece = self.bytes.readline(BUFFER_BYTES)
        self.position += len(piece)
        self.ended = not piece
        self.inside_line = not piece.endswith(b"\n")

    def _skip(self, count: int) -> None:
        if self._packed is None:
            self.position = self.bytes.seek(self.position + count)
            return
        while count and not self.ended:
            piece = self.bytes.read(min(count, BUFFER_BYTES))
            self.position += len(piece)
            count -= len(piece)
            self.ended = not piece


class OpenStreams:
    """A cache of the packed stream that was read last; close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._kept: LineStream | None = None

    def take(self, file: InputFile, start: int) -> LineStream | None:
        """Hand over the kept stream if it can continue with a range of this file from `start`, else None."""
        kept = self._kept
        if kept is None or kept.file != file or start < kept.free_from:
            return None
        self._kept = None
        return kept

    def keep(self, stream: LineStream) -> None:
        """Keep a stream for the next range of its file, in place of the one kept before."""
        self.close()
        self._kept = stream

    def close(self) -> None:
        """Close what is kept."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def __enter__(self) -> OpenStreams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(
    range_: Range, text_field: str = "text", txt_document: TxtDocument = "file", streams: OpenStreams | None = None
) -> RangeReader:
    """Iterate over the items of a range; `streams` keeps packed files open in between."""
    return RangeReader(range_, text_field, txt_document, streams)


class RangeReader:
    """The items of one range, to be iterated over once."""

    def __init__(self, range_: Range, text_field: str, txt_document: TxtDocument, streams: OpenStreams | None):
        self.range, self.text_field, self.txt_document = range_, text_field, txt_document
        self.at_end = False
        """After the iteration: whether the end of the file was met in this range or lies before it."""
        self._streams = streams
        self._stream: LineStream | None = None
        self._disk_start = self._disk_bytes = 0

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk that were read for this range so far, without what was skipped to reach it."""
        if self._stream is not None:
            return max(0, self._stream.disk_position - self._disk_start)
        return self._disk_bytes

    def __iter__(self) -> Iterator[Document | BadLine]:
        if self.range.file.format == "parquet":
            return self._rows()
        return self._whole_file() if is_one_document(self.range.file, self.txt_document) else self._lines()

    def _rows(self) -> Iterator[Document | BadLine]:
        from zerokara.corpus import tables  # pyarrow: only where there is such a file

        file = self.range.file
        yield from tables.read_rows(file, self.range.start, self.range.end, self.text_field)
        self._disk_bytes = self.range.disk_bytes
        self.at_end = True

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
            self._disk_bytes = self.range.disk_bytes
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
