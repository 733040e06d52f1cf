"""How much text a corpus file holds, unpacked, without reading it all: for estimates."""

from __future__ import annotations

import io
from collections.abc import Sequence

from zerokara.corpus.documents import BadLine, Document
from zerokara.corpus.inputs import InputFile
from zerokara.corpus.packed import PackedReader

SAMPLE_FILES = 16
"""Files of each source and format that are sampled."""
_HEAD_BYTES = 256 * 1024
_MAX_UNPACKED_HEAD = 64 * 1024 * 1024
"""Beyond this the head of a packed file is not unpacked (some zeros pack to nothing)."""


def plain_bytes(file: InputFile) -> int:
    """Size of a file unpacked: guessed from its beginning if it is packed, from the footer (all columns) of a .parquet.

    Raises:
        OSError: the file or the network fails.
    """
    if file.format == "parquet":
        return _table_bytes(file)[0]
    if not file.is_packed:
        return file.bytes
    with file.open(_HEAD_BYTES) as raw:
        head = raw.read(_HEAD_BYTES)
    reader = PackedReader(io.BytesIO(head), file.packing, file.name)
    unpacked, buffer = 0, bytearray(1024 * 1024)
    while unpacked < _MAX_UNPACKED_HEAD and (count := reader.readinto(buffer)):
        unpacked += count
    if not unpacked:
        return file.bytes
    return round(file.bytes * unpacked / reader.packed_bytes)


def total_plain_bytes(files: Sequence[InputFile]) -> int:
    """Size of many files unpacked, to some ten percent, from a sample of each format.

    Raises:
        OSError: a file or the network fails.
    """
    alike: dict[tuple[int, str, str], list[InputFile]] = {}
    for file in files:
        alike.setdefault((file.source, file.format, file.packing), []).append(file)
    total = 0
    for members in alike.values():
        filled = [file for file in members if file.bytes]
        sampled = filled[:: -(-len(filled) // SAMPLE_FILES) or 1]
        unpacked = sum(plain_bytes(file) for file in sampled)
        total += unpacked * sum(file.bytes for file in filled) // max(1, sum(file.bytes for file in sampled))
    return total


def bytes_before(item: Document | BadLine) -> int:
    """Unpacked bytes of the file that stand before an item: its share of the rows, in a .parquet."""
    if item.file.format != "parquet":
        return item.offset
    size, rows = _table_bytes(item.file)
    return size * item.offset // max(1, rows)


def _table_bytes(file: InputFile) -> tuple[int, int]:
    from zerokara.corpus import tables  # pyarrow: only where there is such a file

    try:
        return tables.unpacked_bytes(file)
    except tables.Damaged:
        return file.bytes, 1
