"""One line or value of a corpus file → a document, or a bad line with its reason.

Tolerated are CRLF line ends, U+2028 and the like inside a text, a last line without ``\\n``, and a byte order mark
(U+FEFF) at the beginning of a line, where files that were joined have it: it is no part of the text. Anything else
becomes a `BadLine` with a `Reason`, also a text with a NUL, which crashes and wrong conversions leave.
"""

import json
import re
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import orjson

from zerokara.corpus.find import InputFile

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longest line (or .txt document) that is loaded; a novel has about 1 MB, so anything longer is not a document. The
settings' help and the README give the number too."""
EXCERPT_CHARACTERS = 120
BOM = b"\xef\xbb\xbf"

TxtDocument = Literal["file", "line"]


class Reason(StrEnum):
    """Reason why a line is not a document; *damaged* is a compressed file from a byte on, or a row group."""

    EMPTY_LINE = "empty line"
    EMPTY_TEXT = "empty text"
    BROKEN_JSON = "broken JSON"
    SEVERAL_OBJECTS = "several JSON objects on one line"
    NOT_AN_OBJECT = "not a JSON object"
    MISSING_FIELD = "text field missing"
    NULL = "text field is null"
    WRONG_TYPE = "text field is not a string"
    LONE_SURROGATE = "lone surrogate"
    INVALID_UTF8 = "invalid UTF-8"
    ISO_2022 = "ISO-2022 escape sequences instead of UTF-8"
    CR_ENDS = "lines that end in CR alone"
    NUL = "NUL character"
    TRUNCATED_LINE = "truncated last line"
    TOO_LONG = f"longer than {MAX_LINE_BYTES // 1024**2} MiB"
    DAMAGED = "truncated or damaged file"
    NO_TOKENS = "text without tokens"


HARMLESS = frozenset({Reason.EMPTY_LINE})
"""Reasons that lose nothing: counted, but not against `max_bad_fraction`."""


class Document(NamedTuple):
    text: str
    file: InputFile
    line: int
    """Number of the line, or of the row of a .parquet, from 1, within the range."""
    offset: int
    """Byte of the (unpacked) file at which the line starts; index of the row of a .parquet."""
    bytes: int
    """Size of the line with its end in the (unpacked) file; of the value of a .parquet, plus one."""


class BadLine(NamedTuple):
    """One line that is not a document, or the place from which on a file or a row group cannot be read.

    `line`, `offset` and `bytes` are those of a `Document`; of a truncated line `bytes` are what there is.
    """

    file: InputFile
    line: int
    offset: int
    reason: Reason
    excerpt: str
    """Beginning of the line, with bytes that are not UTF-8 written ``\\xNN``; for a damage, its description."""
    bytes: int = 0
    documents: int = 1
    """Number of documents that this loses: the unreadable rows of a damaged row group, else 1."""
    lost_bytes: int = 0
    """Bytes on disk (compressed) that could not be read, or that no checksum confirms (all of a truncated file)."""

    @property
    def damage(self) -> str:
        """What was lost of the file, in words; empty if this is one bad line of many."""
        return self.excerpt if self.reason is Reason.DAMAGED else self.reason if self.lost_bytes else ""


def excerpt(line: bytes) -> str:
    """Beginning of a line as text that any terminal and JSON file can hold."""
    shown = line[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "backslashreplace").rstrip("\r\n")
    return shown[:EXCERPT_CHARACTERS]


def checked(text: str) -> str | Reason:
    """Text of a document without the byte order marks of its lines, or the reason why it is none."""
    if "\ufeff" in text:
        text = re.sub("(?m)^\ufeff+", "", text)
    if not text or text.isspace():
        return Reason.EMPTY_TEXT
    if ("\x1b" in text or "\x0e" in text) and re.search("\x1b\\$|\x0e[!-~]+\x0f", text):  # the latter is Korean
        return Reason.ISO_2022
    return Reason.NUL if "\0" in text else text


def text_of_line(line: bytes) -> str | Reason:
    """Text of a line of a .txt file."""
    try:
        text = checked(line.decode("utf-8").removesuffix("\n").rstrip("\r"))
    except UnicodeDecodeError:
        return Reason.INVALID_UTF8 if line.endswith(b"\n") else Reason.TRUNCATED_LINE
    if "\r" in text:
        return Reason.CR_ENDS
    return Reason.EMPTY_LINE if text is Reason.EMPTY_TEXT else text


def text_of_json(line: bytes, text_field: str) -> str | Reason:
    is_strict = True
    try:
        value: Any = orjson.loads(line)
    except orjson.JSONDecodeError:
        is_strict, value = False, _careful_json(line)
    if type(value) is not dict:
        return value if isinstance(value, Reason) else Reason.NOT_AN_OBJECT
    text = value.get(text_field)
    if type(text) is not str:
        if text_field not in value:
            return Reason.MISSING_FIELD
        return Reason.NULL if text is None else Reason.WRONG_TYPE
    if not is_strict and re.search("[\ud800-\udfff]", text):
        return Reason.LONE_SURROGATE
    return checked(text)


def object_of_line(text: str) -> dict[str, Any] | Reason:
    """JSON object in a line of text, if all its strings can be written."""
    try:
        value: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = _careful_json(text.encode() + b"\n")
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return Reason.LONE_SURROGATE
        except RecursionError:
            return Reason.BROKEN_JSON
    return value if isinstance(value, dict | Reason) else Reason.NOT_AN_OBJECT


def text_of_file(content: bytes) -> tuple[str | Reason, int]:
    """Text of a .txt file that is one document (line ends: ``\\n``), or the reason against it; and its byte, else 0."""
    if not content:
        return Reason.EMPTY_LINE, 0
    try:
        text = checked(content.decode("utf-8").replace("\r\n", "\n").removesuffix("\n"))
    except UnicodeDecodeError as error:
        return Reason.INVALID_UTF8, error.start
    if "\r" in text and "\n" not in text:
        text = Reason.CR_ENDS
    return text, 0


def _careful_json(line: bytes) -> Any:
    """Parse what orjson refuses though it is harmless (NaN, numbers of any length or a lone surrogate in another field,
    a byte order mark), and find the reason for the rest."""
    stripped = line.removeprefix(BOM).strip()
    if not stripped:
        return Reason.EMPTY_LINE
    if b"\0" in line:
        return Reason.NUL
    try:
        text = stripped.decode("utf-8")
        value, end = json.JSONDecoder(parse_int=float).raw_decode(text)  # whole numbers have 4,300 digits at most
        if text[end:].lstrip(" \t\r,").startswith("{"):
            return Reason.SEVERAL_OBJECTS
        return value if end == len(text) else Reason.BROKEN_JSON
    except UnicodeDecodeError:
        reason = Reason.INVALID_UTF8
    except (ValueError, RecursionError):  # fields may be about a thousand levels deep
        reason = Reason.BROKEN_JSON
    return reason if line.endswith(b"\n") else Reason.TRUNCATED_LINE
