"""Rows of a .parquet file → documents and bad lines, row group by row group, in bounded memory.

Only the column with the text is read, about a megabyte of it at a time. A value is text when the column is of strings
(large and dictionary-encoded ones too) or of bytes, which is how writers without logical types store strings; a null
and a value of any other column is no text. Invalid UTF-8 spoils only its own row, a damaged page the rest of its row
group. This module, and pyarrow with it, is imported by whoever meets such a file.
Source: the Parquet format, https://parquet.apache.org/docs/.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from zerokara.corpus import documents
from zerokara.corpus.documents import BadLine, Document, Reason, excerpt, text_of_value
from zerokara.corpus.inputs import InputFile

_BATCH_BYTES = 1024 * 1024
_MAX_BATCH_ROWS = 4096
_DICTIONARY_BATCH_ROWS = 128
"""Rows per batch where pages are dictionary-encoded: a few bytes can stand for much text."""
_PAGE_BUFFER_BYTES, _REMOTE_BUFFER_BYTES = 1024 * 1024, 8 * 1024 * 1024


class Damaged(Exception):
    """The file is not a .parquet, has no readable footer, or a page of it cannot be read."""

    def __str__(self) -> str:
        """What pyarrow says, in one line and shortened."""
        return excerpt(" ".join(super().__str__().split()).encode())


def gathered_row_groups(file: InputFile, target_bytes: int) -> list[tuple[int, int | None, int]]:
    """Consecutive row groups of about `target_bytes` together: (first, end, their bytes on disk) of each part."""
    try:
        with _opened(file) as table:
            sizes = _disk_sizes(table.metadata, file.bytes)
    except Damaged:
        return [(0, None, file.bytes)]  # The reader tells.
    parts: list[tuple[int, int | None, int]] = []
    first = size = 0
    for group, group_bytes in enumerate(sizes):
        if size and size + group_bytes > target_bytes:
            parts.append((first, group, size))
            first, size = group, 0
        size += group_bytes
    return [*parts, (first, len(sizes), size)]


def column_names(file: InputFile) -> list[str]:
    """The names of the columns.

    Raises:
        Damaged: the file is not a .parquet.
    """
    with _opened(file) as table:
        return list(table.schema_arrow.names)


def unpacked_bytes(file: InputFile) -> tuple[int, int]:
    """Bytes of all columns, unpacked, and the number of rows.

    Raises:
        Damaged: the file is not a .parquet.
    """
    with _opened(file) as table:
        footer = table.metadata
        return sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups)), footer.num_rows


def row_groups(file: InputFile, start: int, end: int | None, text_field: str) -> Iterator[RowGroup]:
    """Read the row groups from `start` to before `end`; each is to be iterated over before the next.

    Raises:
        Damaged: the file is not a .parquet.
        OSError: the disk or the network failed.
    """
    with _opened(file) as table:
        footer = table.metadata
        sizes = _disk_sizes(footer, file.bytes)
        first_row = sum(footer.row_group(i).num_rows for i in range(min(start, footer.num_row_groups)))
        line = 1
        for number in range(start, footer.num_row_groups if end is None else min(end, footer.num_row_groups)):
            group = RowGroup(file, table, number, text_field, first_row, line, sizes[number])
            yield group
            first_row, line = group.end, group.line


def rows(file: InputFile) -> Iterator[dict[str, Any] | None]:
    """Each row with the values of all columns by name; None for one with a string that is not UTF-8.

    Raises:
        Damaged: the file is not a .parquet, or a page of it cannot be read.
        OSError: the disk or the network failed.
    """
    with _opened(file) as table:
        batches = table.iter_batches(_DICTIONARY_BATCH_ROWS, use_threads=False)
        while True:
            with _damage():
                batch = next(batches, None)
            if batch is None:
                return
            try:
                yield from batch.to_pylist()
            except UnicodeDecodeError:  # raised before the first row is given
                for number in range(batch.num_rows):
                    yield _row(batch, number)


def _row(batch: pa.RecordBatch, number: int) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = batch.slice(number, 1).to_pylist()[0]
        return found
    except UnicodeDecodeError:
        return None


@contextmanager
def _opened(file: InputFile) -> Iterator[pq.ParquetFile]:
    with file.open(0) as raw:
        buffer_bytes = _PAGE_BUFFER_BYTES if file.remote is None else _REMOTE_BUFFER_BYTES
        with _damage():
            options: dict[str, Any] = {
                "buffer_size": buffer_bytes,
                "pre_buffer": False,
                "page_checksum_verification": True,
            }
            table = pq.ParquetFile(raw, **options)
            _check_footer(table.metadata)
            if any(pa.types.is_dictionary(column.type) for column in table.schema_arrow):
                table = pq.ParquetFile(raw, metadata=_without_arrow_schema(table.metadata), **options)
        yield table


@contextmanager
def _damage() -> Iterator[None]:
    """Raise `Damaged` for pyarrow's errors about a file; let errors of the disk and the network pass."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise Damaged(str(error)) from error
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise Damaged(str(error)) from error


def _without_arrow_schema(footer: pq.FileMetaData) -> pq.FileMetaData:
    """The footer without Arrow's own schema, by which pyarrow would read a column of Arrow's dictionary type as one.

    That gathers the texts of a whole row group in one dictionary, at several times their size. Without it the column is
    one of strings, as for any other reader of the file.
    """
    thrift = io.BytesIO()
    footer.write_metadata_file(thrift)
    renamed = thrift.getvalue().replace(b"ARROW:schema", b"NO_ARROW_ONE")  # as long, and unknown to all readers
    return pq.read_metadata(io.BytesIO(renamed))


def _check_footer(footer: pq.FileMetaData) -> None:
    """Refuse a footer whose numbers contradict each other: losses are counted by them."""
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    rows = [group.num_rows for group in groups]
    sizes = [group.column(i).total_compressed_size for group in groups for i in range(group.num_columns)]
    if min([0, *rows, *sizes]) < 0 or sum(rows) != footer.num_rows:
        raise Damaged(f"the footer has {footer.num_rows:,} rows in all, and {sum(rows):,} in its row groups")


def _disk_sizes(footer: pq.FileMetaData, file_bytes: int) -> list[int]:
    """Each row group's share of the file in bytes, by its packed columns; they add up to the file."""
    packed = [
        sum(group.column(i).total_compressed_size for i in range(group.num_columns))
        for group in (footer.row_group(number) for number in range(footer.num_row_groups))
    ]
    total, sizes, so_far = max(1, sum(packed)), [], 0
    for size in packed:
        sizes.append(file_bytes * (so_far + size) // total - file_bytes * so_far // total)
        so_far += size
    return sizes


class RowGroup:
    """The items of one row group, to be iterated over once."""

    def __init__(
        self,
        file: InputFile,
        table: pq.ParquetFile,
        group: int,
        text_field: str,
        first_row: int,
        line: int,
        disk_bytes: int,
    ):
        self.file, self.table, self.group, self.text_field = file, table, group, text_field
        self.row, self.line = first_row, line
        self.disk_bytes = disk_bytes
        """Its share of the file's bytes."""
        self.is_last = group == table.metadata.num_row_groups - 1
        self._first, self.end = first_row, first_row + table.metadata.row_group(group).num_rows

    @property
    def read_bytes(self) -> int:
        """The part of its share that was read so far."""
        return round(self.disk_bytes * (self.row - self._first) / max(1, self.end - self._first))

    def __iter__(self) -> Iterator[Document | BadLine]:
        reason, why = self._fault_of_column()
        if reason:
            while self.row < self.end:
                yield self._item(reason, why)
            return
        batches = self._batches()
        while True:
            try:
                with _damage():
                    values = next(batches, None)
            except Damaged as damage:
                yield self._rest(str(damage))
                return
            if values is None:
                if self.row < self.end:
                    yield self._rest("the row group holds fewer rows than its footer says")
                return
            for value in values[: self.end - self.row]:
                yield self._item_of(value)

    def _item_of(self, value: bytes | None) -> Document | BadLine:
        if value is None:
            return self._item(Reason.NULL, "null")
        if len(value) > documents.MAX_LINE_BYTES:
            return self._item(Reason.TOO_LONG, excerpt(value), len(value) + 1)
        text = text_of_value(value)
        if isinstance(text, Reason):
            return self._item(text, excerpt(value), len(value) + 1)
        self.row, self.line = self.row + 1, self.line + 1
        return Document(text, self.file, self.line - 1, self.row - 1, len(value) + 1)

    def _item(self, reason: Reason, shown: str, size: int = 1) -> BadLine:
        self.row, self.line = self.row + 1, self.line + 1
        return BadLine(self.file, self.line - 1, self.row - 1, reason, shown, size)

    def _rest(self, damage: str) -> BadLine:
        """The rows that cannot be read, as one item, with their share of the row group's bytes."""
        line, row, missing = self.line, self.row, max(1, self.end - self.row)
        lost = self.disk_bytes - self.disk_bytes * (row - self._first) // max(1, self.end - self._first)
        self.row, self.line = row + missing, line + missing
        return BadLine(self.file, line, row, Reason.DAMAGED, damage, 0, missing, lost)

    def _fault_of_column(self) -> tuple[Reason | None, str]:
        schema = self.table.schema_arrow
        if self.text_field not in schema.names:
            return Reason.MISSING_FIELD, excerpt(f"the columns are {', '.join(schema.names)}".encode())
        kind = schema.field(schema.names.index(self.text_field)).type
        return (None, "") if _holds_text(kind) else (Reason.WRONG_TYPE, excerpt(f"a column of {kind}".encode()))

    def _batches(self) -> Iterator[list[bytes | None]]:
        """The values of the column, in batches."""
        column = self.table.metadata.row_group(self.group)
        rows = max(1, column.num_rows)
        sizes = [column.column(i) for i in range(column.num_columns)]
        text_bytes = sum(c.total_uncompressed_size for c in sizes if c.path_in_schema == self.text_field)
        from_dictionary = any(c.has_dictionary_page for c in sizes if c.path_in_schema == self.text_field)
        most_rows = _DICTIONARY_BATCH_ROWS if from_dictionary else _MAX_BATCH_ROWS
        batch_rows = min(most_rows, max(1, _BATCH_BYTES * rows // max(1, text_bytes)))
        batches = self.table.iter_batches(batch_rows, [self.group], [self.text_field], use_threads=False)
        for batch in batches:
            yield _values(batch.column(batch.schema.names.index(self.text_field)))


def _holds_text(kind: pa.DataType) -> bool:
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    views = (types.is_string_view, types.is_binary_view)
    return any(test(kind) for test in tests + views)


def _values(column: Any) -> list[bytes | None]:
    """The values as bytes, undecoded: one invalid string would spoil the whole batch."""
    return column.cast(pa.large_binary()).to_pylist()
