"""Byte ranges of corpus files → documents and bad lines, streaming, in constant memory.

A plain file whose documents are lines is cut into byte ranges, and a range owns every line that *starts* in it, so
that ranges of any size cover each line once. A gzipped file and a .txt file that is one document are read whole.

What is read as it was meant: a byte order mark, CRLF line ends, U+2028 and the like inside a JSON string (only
``\\n`` ends a line), a last line without ``\\n``. A .txt file that is one document has its line ends made ``\\n`` and
its final one removed. What is put aside is a `BadLine` with a `Reason`. A NUL is put aside too: it is no character of
any writing system, and stands where a crash or a wrong conversion left it.

Every line gives exactly one item, so the number of items is the number of lines (a damaged .gz gives one item more).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Any, Literal, NamedTuple

import orjson

from zerokara.corpus.gzipped import GzipReader
from zerokara.corpus.inputs import InputFile

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longest line (or .txt document) that is loaded; a novel has about 1 MB, so what is longer is not a document."""
EXCERPT_CHARACTERS = 120
_BUFFER_BYTES = 1024 * 1024
_BOM = b"\xef\xbb\xbf"

TxtDocument = Literal["file", "line"]


class Reason(StrEnum):
    """Why a line is no document."""

    EMPTY_LINE = "empty line"
    EMPTY_TEXT = "empty text"
    BROKEN_JSON = "broken JSON"
    NOT_AN_OBJECT = "not a JSON object"
    MISSING_FIELD = "text field missing"
    WRONG_TYPE = "text field is not a string"
    LONE_SURROGATE = "lone surrogate"
    INVALID_UTF8 = "invalid UTF-8"
    NUL = "NUL character"
    TRUNCATED_LINE = "truncated last line"
    TOO_LONG = f"longer than {MAX_LINE_BYTES // 1024**2} MiB"
    DAMAGED_GZIP = "truncated or damaged .gz"
    NO_TOKENS = "text without tokens"


HARMLESS = frozenset({Reason.EMPTY_LINE})
"""Reasons by which nothing is lost: counted, but not held against `max_bad_fraction`."""


class Document(NamedTuple):
    """One document."""

    text: str
    file: InputFile
    line: int
    """Counted from 1, within the range."""
    offset: int
    """Byte at which the line starts, in the (uncompressed) file."""


class BadLine(NamedTuple):
    """One line that is no document."""

    file: InputFile
    line: int
    """Counted from 1, within the range."""
    offset: int
    reason: Reason
    excerpt: str
    """The beginning of the line, with bytes that are no UTF-8 spelt ``\\xNN``."""


@dataclass(frozen=True)
class ByteRange:
    """A part of a file: the lines that start at `start` or later and before `end`."""

    file: InputFile
    start: int = 0
    end: int | None = None
    """None: to the end of the file, which is then read whole."""

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return (self.file.bytes if self.end is None else self.end) - self.start


def ranges(files: Sequence[InputFile], target_bytes: int, txt_document: TxtDocument = "file") -> list[ByteRange]:
    """Cut files into ranges of about `target_bytes`, in corpus order; those that cannot be cut stay whole."""
    cut: list[ByteRange] = []
    for file in files:
        whole = file.gzipped or (file.kind == "txt" and txt_document == "file") or file.bytes <= target_bytes
        if whole:
            cut.append(ByteRange(file))
            continue
        starts = range(0, file.bytes, max(1, target_bytes))
        cut.extend(ByteRange(file, start, min(start + starts.step, file.bytes)) for start in starts)
    return cut


def read(range_: ByteRange, text_field: str = "text", txt_document: TxtDocument = "file") -> RangeReader:
    """Iterate over the documents and bad lines of a range, in order."""
    return RangeReader(range_, text_field, txt_document)


class RangeReader:
    """The items of one range; `position` tells how far into the file on disk the reading has come."""

    def __init__(self, range_: ByteRange, text_field: str, txt_document: TxtDocument):
        self.range, self.text_field, self.txt_document = range_, text_field, txt_document
        self._raw: IO[bytes] | None = None
        self._gzip: GzipReader | None = None
        self._plain_position = range_.start

    @property
    def position(self) -> int:
        """Bytes of the file on disk that are done with (compressed bytes if gzipped)."""
        if self.range.file.gzipped and self._raw is not None and not self._raw.closed:
            return self._raw.tell()
        return self._plain_position

    @property
    def _damage(self) -> str:
        return self._gzip.damage if self._gzip else ""

    def __iter__(self) -> Iterator[Document | BadLine]:
        file = self.range.file
        with open(file.path, "rb", buffering=_BUFFER_BYTES) as raw:
            self._raw = raw
            self._gzip = GzipReader(raw) if file.gzipped else None
            stream: IO[bytes] = io.BufferedReader(self._gzip, _BUFFER_BYTES) if self._gzip else raw
            if file.kind == "txt" and self.txt_document == "file":
                yield self._whole_file(stream)
            else:
                yield from self._lines(stream)
        self._plain_position = file.bytes if self.range.end is None else self.range.end

    def _lines(self, stream: IO[bytes]) -> Iterator[Document | BadLine]:
        file, end, text_field = self.range.file, self.range.end, self.text_field
        is_json = file.kind == "jsonl"
        position, number = self._first_line_start(stream), 0
        while end is None or position < end:
            line = stream.readline(MAX_LINE_BYTES + 1)
            number += 1
            if self._damage and not line.endswith(b"\n"):
                yield BadLine(file, number, position, Reason.DAMAGED_GZIP, self._damage)
                return
            if not line:
                return
            start, position = position, position + len(line)
            if len(line) > MAX_LINE_BYTES:
                yield BadLine(file, number, start, Reason.TOO_LONG, excerpt(line))
                position += _skip_line(stream) if not line.endswith(b"\n") else 0
            else:
                text = _text_of_json(line, text_field) if is_json else _text_of_line(line, start)
                if isinstance(text, Reason):
                    yield BadLine(file, number, start, text, excerpt(line))
                else:
                    yield Document(text, file, number, start)
            self._plain_position = position

    def _first_line_start(self, stream: IO[bytes]) -> int:
        """Go to the first line that starts in the range: past the rest of a line that started before it."""
        start, end = self.range.start, self.range.end
        if start == 0:
            return 0
        position = stream.seek(start - 1)
        while end is None or position < end:
            piece = stream.readline(_BUFFER_BYTES)
            position += len(piece)
            if not piece or piece.endswith(b"\n"):
                break
        return position

    def _whole_file(self, stream: IO[bytes]) -> Document | BadLine:
        file = self.range.file
        content = stream.read(MAX_LINE_BYTES + 1)
        if self._damage:
            return BadLine(file, 1, 0, Reason.DAMAGED_GZIP, self._damage)
        if len(content) > MAX_LINE_BYTES:
            return BadLine(file, 1, 0, Reason.TOO_LONG, excerpt(content))
        try:
            text = content.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
        except UnicodeDecodeError as error:
            return BadLine(file, 1, error.start, Reason.INVALID_UTF8, excerpt(content[error.start :]))
        reason = _fault_of(text)
        return BadLine(file, 1, 0, reason, excerpt(content)) if reason else Document(text, file, 1, 0)


def excerpt(line: bytes) -> str:
    """The beginning of a line as text that any terminal and JSON file can hold."""
    shown = line[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "backslashreplace").rstrip("\r\n")
    return shown[:EXCERPT_CHARACTERS]


def _skip_line(stream: IO[bytes]) -> int:
    """Read to the end of the line without keeping it; gives the number of bytes."""
    skipped = 0
    while piece := stream.readline(_BUFFER_BYTES):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _fault_of(text: str) -> Reason | None:
    """What is wrong with a text, if anything."""
    if not text or text.isspace():
        return Reason.EMPTY_TEXT
    return Reason.NUL if "\0" in text else None


def _text_of_line(line: bytes, offset: int) -> str | Reason:
    """The text of a line of a .txt file."""
    try:
        text = (line if offset else line.removeprefix(_BOM)).decode("utf-8")
    except UnicodeDecodeError:
        return Reason.INVALID_UTF8 if line.endswith(b"\n") else Reason.TRUNCATED_LINE
    text = text.removesuffix("\n").removesuffix("\r")
    reason = _fault_of(text)
    return Reason.EMPTY_LINE if reason is Reason.EMPTY_TEXT else reason or text


def _text_of_json(line: bytes, text_field: str) -> str | Reason:
    """The text of a line of JSON: the quick way first, the careful way for what it refuses."""
    careful = False
    try:
        value: Any = orjson.loads(line)
    except orjson.JSONDecodeError:
        careful, value = True, _careful_json(line)
        if isinstance(value, Reason):
            return value
    if type(value) is not dict:
        return Reason.NOT_AN_OBJECT
    text = value.get(text_field)
    if type(text) is not str:
        return Reason.WRONG_TYPE if text_field in value else Reason.MISSING_FIELD
    if careful and any("\ud800" <= character <= "\udfff" for character in text):
        return Reason.LONE_SURROGATE
    return _fault_of(text) or text


def _careful_json(line: bytes) -> Any:
    """Read what orjson refuses though it does no harm (NaN, huge numbers or a lone surrogate in another field, a byte
    order mark), and find the reason for the rest."""
    stripped = line.removeprefix(_BOM).strip()
    if not stripped:
        return Reason.EMPTY_LINE
    if b"\0" in line:
        return Reason.NUL
    unfinished = not line.endswith(b"\n")
    try:
        return json.loads(stripped.decode("utf-8"))
    except UnicodeDecodeError:
        return Reason.TRUNCATED_LINE if unfinished else Reason.INVALID_UTF8
    except (ValueError, RecursionError):
        return Reason.TRUNCATED_LINE if unfinished else Reason.BROKEN_JSON
