"""Files of examples → records: the fields of each line, with its place; and the lines that hold none.

Formats by name: ``.jsonl``, ``.json``, ``.ndjson`` (one JSON object a line); ``.tsv`` and ``.txt`` (values between
tabs, the first line names them); each plain, ``.gz`` or ``.zst``; ``.parquet``. In a .tsv every character but tab and
line end is plain: quotes too (what pandas calls ``quoting=3``), and a backslash.

Lines are read as those of a corpus (`corpus.read`): a byte order mark and CRLF are tolerated; a line that is not
UTF-8, has a NUL or is too long is bad. Blank lines are no records. A damaged file is an error: of a few examples none
may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zerokara.corpus.documents import HARMLESS, BadLine, Reason, excerpt, object_of_line
from zerokara.corpus.find import TABLES, InputFile, find_files
from zerokara.corpus.read import Range, read, total_plain_bytes
from zerokara.errors import Fault, UserError, shown


class Record(NamedTuple):
    """The fields of one line, or why it holds none."""

    file: InputFile
    line: int
    """Counted from 1, in the file; a row, in a .parquet."""
    offset: int
    """Byte at which the line starts, in the (unpacked) file; the index of the row, in a .parquet."""
    values: dict[str, Any]
    reason: str = ""
    """Why it is bad; empty for a good one."""
    excerpt: str = ""
    """Its beginning, where it is bad."""

    @property
    def place(self) -> str:
        """``file:line``, for messages."""
        return f"{self.file.name}:{self.line}"

    def bad(self, reason: str, text: str | None = None) -> Record:
        """The bad line that this is, as it turned out; its text is made of the values where it is not given."""
        content = "\t".join(map(str, self.values.values())) if text is None else text
        return self._replace(reason=reason, excerpt=excerpt(content.encode("utf-8", "backslashreplace")))


def find_example_files(entries: Sequence[str], where: str) -> list[InputFile]:
    """Find the files of entries, as `find_files` does; `where` is their place in the configuration."""
    return find_files(entries, where, TABLES) if entries else []


def read_records(file: InputFile, advance: Callable[[float], object] = lambda amount: None) -> Iterator[Record]:
    """Iterate over the records and bad lines of a file; `advance` is told what bytes each takes on disk, about.

    Raises:
        UserError: the file is damaged, or the first line of a table names no columns or cannot be read; names the file.
        OSError: the disk or the network fails.
    """
    return _rows(file, advance) if file.format == "parquet" else _lines(file, advance)


def _lines(file: InputFile, advance: Callable[[float], object]) -> Iterator[Record]:
    names, share_on_disk = list[str](), file.bytes / max(1, total_plain_bytes([file]))
    values: dict[str, Any] | str
    for item in read(Range(replace(file, format="txt")), txt_document="line"):
        advance(item.bytes * share_on_disk)
        record = Record(file, item.line, item.offset, {})
        if isinstance(item, BadLine):
            if item.reason is Reason.DAMAGED:
                raise _damaged(file, item.excerpt)
            if item.reason in HARMLESS:
                continue
            if file.format != "jsonl" and not names:  # the next line would be taken for them
                rule = f"the first line, which names the columns, cannot be read: {item.reason.value}"
                remedy = "save the file as UTF-8 (iconv -f EUC-KR -t UTF-8, for one in EUC-KR), or mend the line"
                raise UserError(Fault(record.place, rule, value=shown(item.excerpt), remedy=remedy))
            yield record._replace(reason=item.reason.value, excerpt=item.excerpt)
            continue
        if file.format == "jsonl":
            values = object_of_line(item.text)
        elif not names:
            names = _column_names(item.text, record.place)
            continue
        elif len(cells := item.text.split("\t")) == len(names):
            values = dict(zip(names, cells, strict=True))
        else:
            values = f"{len(cells)} columns instead of {len(names)}"
        yield record.bad(str(values), item.text) if isinstance(values, str) else record._replace(values=values)


def _column_names(line: str, where: str) -> list[str]:
    names = [cell.strip() for cell in line.split("\t")]
    if len(names) < 2:
        rule = "the first line has no tab; that of a .tsv or .txt names the columns, with tabs between them"
        raise UserError(Fault(where, rule, value=shown(excerpt(line.encode())), remedy="add it, or use .jsonl"))
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(Fault(where, f"the first line names the column {twice[0]!r} twice", remedy="rename one"))
    return names


def _rows(file: InputFile, advance: Callable[[float], object]) -> Iterator[Record]:
    from zerokara.corpus import tables  # pyarrow: only where there is such a file

    number = 0
    try:
        with tables.opened(file) as table, tables.damage():
            for batch in table.iter_batches(128, use_threads=False):
                for row in zip(*batch.columns, strict=True):
                    number += 1
                    record = Record(file, number, number - 1, {})
                    try:
                        values = [cell.as_py() for cell in row]
                        yield record._replace(values=dict(zip(batch.schema.names, values, strict=True)))
                    except UnicodeDecodeError:
                        yield record._replace(reason=Reason.INVALID_UTF8.value)
    except tables.Damaged as damage:
        raise _damaged(file, str(damage)) from damage
    advance(file.bytes)


def _damaged(file: InputFile, why: str) -> UserError:
    return UserError(Fault(file.name, f"is damaged: {why}", remedy="copy or download it again"))
