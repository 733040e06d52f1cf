"""Rows of a .parquet file → documents and bad lines, row group by row group, in bounded memory.

Only the column with the text is read, about a megabyte at a time, of strings or of bytes; of a column of dictionary
type (pandas' categories) pyarrow holds the distinct texts of a row group. Invalid UTF-8 spoils only its own row, a
damaged page the rest of its row group. Source: the Parquet format, https://parquet.apache.org/docs/.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, groupby, pairwise

import pyarrow as pa
import pyarrow.parquet as pq

from zerokara.corpus import documents
from zerokara.corpus.documents import BadLine, Document, Reason, checked, excerpt
from zerokara.corpus.find import InputFile

_BATCH_BYTES = 1024 * 1024
_MAX_BATCH_ROWS = 4096
_DICTIONARY_BATCH_ROWS = 128
"""Rows per batch where pages are dictionary-encoded: a few bytes can stand for much text."""
_PAGE_BUFFER_BYTES, _REMOTE_BUFFER_BYTES = 1024 * 1024, 8 * 1024 * 1024


class Damaged(Exception):
    """Error of a file that is not a .parquet, has no readable footer, or has a page that cannot be read."""


def gathered_row_groups(file: InputFile, target_bytes: int) -> list[tuple[int, int | None, int]]:
    """Consecutive row groups of about `target_bytes` together: (first, end, their bytes on disk) of each part."""
    try:
        with opened(file) as table:
            sizes = _disk_sizes(table.metadata, file.bytes)
    except Damaged:
        return [(0, None, file.bytes)]  # The reader tells.
    ends = list(accumulate(sizes))
    parts = [list(part) for _, part in groupby(range(len(sizes)), lambda number: (ends[number] - 1) // target_bytes)]
    return [(part[0], part[-1] + 1, sum(sizes[number] for number in part)) for part in parts] or [(0, None, file.bytes)]


def text_bytes(file: InputFile, text_field: str) -> int:
    """Unpacked bytes of the column with the text; a file that is no .parquet counts as it is."""
    try:
        with opened(file) as table:
            chunks = [chunk for group in _groups(table.metadata) for chunk in _text_chunks(group, text_field)]
            return sum(chunk.total_uncompressed_size for chunk in chunks)
    except Damaged:
        return file.bytes


def read_rows(file: InputFile, start: int, end: int | None, text_field: str) -> Iterator[Document | BadLine]:
    """Items of the row groups from `start` to before `end`: one a row, and one for all rows that a damage loses."""
    try:
        with opened(file) as table:
            sizes, groups = _disk_sizes(table.metadata, file.bytes), _groups(table.metadata)
            first_row = row = sum(group.num_rows for group in groups[:start])
            for number, group in list(enumerate(groups))[start:end]:
                yield from _items_of_group(file, table, number, text_field, row, first_row, sizes[number])
                row += group.num_rows
    except Damaged as damage:  # the number of lost rows is unknown
        yield BadLine(file, 1, 0, Reason.DAMAGED, str(damage), lost_bytes=file.bytes)


@contextmanager
def opened(file: InputFile) -> Iterator[pq.ParquetFile]:
    """Open the file, to be read under `damage`; raises Damaged if it is no .parquet."""
    with file.open(0) as raw:
        buffer_bytes = _PAGE_BUFFER_BYTES if file.remote is None else _REMOTE_BUFFER_BYTES
        with damage():
            table = pq.ParquetFile(raw, pre_buffer=False, page_checksum_verification=True, buffer_size=buffer_bytes)
        yield table


@contextmanager
def damage() -> Iterator[None]:
    """Raise `Damaged` for pyarrow's errors about a file; let errors of the disk and the network pass."""
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Damaged(excerpt(" ".join(str(error).split()).encode())) from error


def _disk_sizes(footer: pq.FileMetaData, file_bytes: int) -> list[int]:
    """Share of each row group in the file in bytes, by its compressed columns; they add up to the file."""
    columns = [[group.column(i).total_compressed_size for i in range(group.num_columns)] for group in _groups(footer)]
    ends = list(accumulate(map(sum, columns), initial=0))
    shares = [file_bytes * end // max(1, ends[-1]) for end in ends]
    return [end - start for start, end in pairwise(shares)]


def _groups(footer: pq.FileMetaData) -> list[pq.RowGroupMetaData]:
    return [footer.row_group(number) for number in range(footer.num_row_groups)]


def _text_chunks(group: pq.RowGroupMetaData, text_field: str) -> list[pq.ColumnChunkMetaData]:
    columns = (group.column(i) for i in range(group.num_columns))
    return [column for column in columns if column.path_in_schema == text_field]


def _items_of_group(
    file: InputFile, table: pq.ParquetFile, number: int, text_field: str, row: int, first_row: int, disk_bytes: int
) -> Iterator[Document | BadLine]:
    """Items of a row group that begins at `row`; lines are counted from `first_row`."""
    schema, group = table.schema_arrow, table.metadata.row_group(number)
    start, end = row, row + group.num_rows
    kind = schema.field(schema.names.index(text_field)).type if text_field in schema.names else None
    kind = kind.value_type if kind is not None and pa.types.is_dictionary(kind) else kind
    if str(kind).removeprefix("large_").removesuffix("_view") not in ("string", "binary", "null"):
        reason, message = Reason.WRONG_TYPE, f"a column of {kind}"
        if kind is None:
            reason, message = Reason.MISSING_FIELD, f"the columns are {', '.join(schema.names)}"
        shown = excerpt(message.encode())
        yield from (BadLine(file, at - first_row + 1, at, reason, shown, 1) for at in range(row, end))
        return
    chunks = _text_chunks(group, text_field)
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    most_rows = _DICTIONARY_BATCH_ROWS if any(chunk.has_dictionary_page for chunk in chunks) else _MAX_BATCH_ROWS
    batch_rows = min(most_rows, max(1, _BATCH_BYTES * max(1, group.num_rows) // max(1, size)))
    batches = table.iter_batches(batch_rows, [number], [text_field], use_threads=False)
    try:
        while row < end:
            with damage():
                batch = next(batches, None)
                if batch is None:
                    raise ValueError("the row group holds fewer rows than its footer says")
                # As bytes, for one invalid string would spoil the batch.
                column = batch.column(batch.schema.names.index(text_field)).cast(pa.large_binary())
            for value in column.to_pylist()[: end - row]:
                yield _item(file, row - first_row + 1, row, value, disk_bytes)
                row += 1
    except Damaged as why:
        lost = disk_bytes - disk_bytes * (row - start) // (end - start)
        yield BadLine(file, row - first_row + 1, row, Reason.DAMAGED, str(why), 0, end - row, lost)


def _item(file: InputFile, line: int, row: int, value: bytes | None, disk_bytes: int) -> Document | BadLine:
    if value is None:
        return BadLine(file, line, row, Reason.NULL, "null", 1)
    size = len(value) + 1
    if len(value) > documents.MAX_LINE_BYTES:
        return BadLine(file, line, row, Reason.TOO_LONG, excerpt(value), size, lost_bytes=min(size, disk_bytes))
    try:
        text = checked(str(value, "utf-8"))
    except UnicodeDecodeError:
        text = Reason.INVALID_UTF8
    if isinstance(text, Reason):
        return BadLine(file, line, row, text, excerpt(value), size)
    return Document(text, file, line, row, size)
