"""Files of examples → records: the fields of each line, with its place; and the lines that hold none.

Formats by name: ``.jsonl``, ``.json``, ``.ndjson`` (one JSON object a line); ``.tsv`` and ``.txt`` (values between
tabs, the first line names them); each plain, ``.gz`` or ``.zst``; ``.parquet``. In a .tsv every character but tab and
line end is plain: quotes too (what pandas calls ``quoting=3``), and a backslash.

Lines are read as those of a corpus (`corpus.reading`): a byte order mark and CRLF are tolerated; a line that is not
UTF-8, has a NUL or is too long is bad. Blank lines are no records. A damaged file is an error: of a few examples none
may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from zerokara.corpus.documents import HARMLESS, BadLine, Reason, excerpt, object_of_line
from zerokara.corpus.inputs import TABLES, InputFile, find_files
from zerokara.corpus.reading import Range, plain_bytes, read
from zerokara.errors import Fault, UserError, shown

HEAD_LINES = 50
"""Records of a file that show whether a format fits it."""


class Record(NamedTuple):
    """The fields of one line."""

    values: dict[str, Any]
    file: InputFile
    line: int
    """Counted from 1, in the file; a row, in a .parquet."""
    offset: int
    """Byte at which the line starts, in the (unpacked) file; the index of the row, in a .parquet."""

    @property
    def place(self) -> str:
        """``file:line``, for messages."""
        return f"{self.file.name}:{self.line}"


class BadRecord(NamedTuple):
    """A line that holds no example; as the quarantine file has it."""

    file: str
    line: int
    offset: int
    reason: str
    excerpt: str


def bad_record(record: Record, reason: str) -> BadRecord:
    """The bad line that a record is, as it turned out."""
    values = "\t".join(str(value) for value in record.values.values())
    return BadRecord(
        record.file.name, record.line, record.offset, reason, excerpt(values.encode("utf-8", "backslashreplace"))
    )


def find_example_files(entries: Sequence[str], where: str) -> list[InputFile]:
    """Find the files of entries; `where` is their place in the configuration.

    Raises: UserError as `find_files` does.
    """
    return find_files(entries, where, TABLES) if entries else []


def read_records(file: InputFile, at: Callable[[int], object] | None = None) -> Iterator[Record | BadRecord]:
    """Iterate over the records and bad lines of a file; `at` is told the bytes on disk that were read so far.

    Raises:
        UserError: the file is damaged, or the first line of a table names no columns or cannot be read; names the file.
        OSError: the disk or the network fails.
    """
    if file.format == "parquet":
        return _rows(file, at)
    return _objects(file, at) if file.format == "jsonl" else _cells(file, at)


def first_records(file: InputFile) -> list[Record]:
    """The first records of a file, at most `HEAD_LINES`."""
    return list(islice((each for each in read_records(file) if isinstance(each, Record)), HEAD_LINES))


def _objects(file: InputFile, at: Callable[[int], object] | None) -> Iterator[Record | BadRecord]:
    for line, offset, text in _lines(file, at):
        if isinstance(text, BadRecord):
            yield text
            continue
        values = object_of_line(text)
        if isinstance(values, Reason):
            yield BadRecord(file.name, line, offset, values.value, excerpt(text.encode()))
        else:
            yield Record(values, file, line, offset)


def _cells(file: InputFile, at: Callable[[int], object] | None) -> Iterator[Record | BadRecord]:
    names: list[str] = []
    for line, offset, text in _lines(file, at):
        if isinstance(text, BadRecord):
            if not names:
                raise _unreadable_names(text)
            yield text
            continue
        cells = text.split("\t")
        if not names:
            names = _column_names(cells, f"{file.name}:{line}")
        elif len(cells) != len(names):
            reason = f"{len(cells)} columns instead of {len(names)}"
            yield BadRecord(file.name, line, offset, reason, excerpt(text.encode()))
        else:
            yield Record(dict(zip(names, cells, strict=True)), file, line, offset)


def _unreadable_names(bad: BadRecord) -> UserError:
    """The error of a table whose names cannot be read; the next line would be taken for them."""
    rule = f"the first line, which names the columns, cannot be read: {bad.reason}"
    remedy = "save the file as UTF-8 (iconv -f EUC-KR -t UTF-8, for one in EUC-KR)"
    if bad.reason != Reason.INVALID_UTF8.value:
        remedy = "mend it"
    return UserError(Fault(f"{bad.file}:{bad.line}", rule, value=shown(bad.excerpt), remedy=remedy))


def _column_names(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if len(names) < 2:
        rule = "the first line has no tab; that of a .tsv or .txt names the columns, with tabs between them"
        raise UserError(Fault(where, rule, value=shown(excerpt(cells[0].encode())), remedy="add it, or use .jsonl"))
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(Fault(where, f"the first line names the column {twice[0]!r} twice", remedy="rename one"))
    return names


def _lines(file: InputFile, at: Callable[[int], object] | None) -> Iterator[tuple[int, int, str | BadRecord]]:
    """Number, offset and text of each line that is not blank."""
    share_on_disk = file.bytes / max(1, plain_bytes(file))
    for item in read(Range(replace(file, format="txt")), txt_document="line"):
        if at is not None and item.line % 256 == 0:
            at(min(file.bytes, round(item.offset * share_on_disk)))
        if not isinstance(item, BadLine):
            yield item.line, item.offset, item.text
        elif item.reason is Reason.DAMAGED:
            raise _damaged(file, item.excerpt)
        elif item.reason not in HARMLESS:
            bad = BadRecord(file.name, item.line, item.offset, item.reason.value, item.excerpt)
            yield item.line, item.offset, bad
    if at is not None:
        at(file.bytes)


def _rows(file: InputFile, at: Callable[[int], object] | None) -> Iterator[Record | BadRecord]:
    from zerokara.corpus import tables  # pyarrow: only where there is such a file

    try:
        for number, values in enumerate(tables.rows(file)):
            if values is None:
                yield BadRecord(file.name, number + 1, number, Reason.INVALID_UTF8.value, "")
            else:
                yield Record(values, file, number + 1, number)
    except tables.Damaged as damage:
        raise _damaged(file, str(damage)) from damage
    if at is not None:
        at(file.bytes)


def _damaged(file: InputFile, why: str) -> UserError:
    return UserError(Fault(file.name, f"is damaged: {why}", remedy="copy or download it again"))
