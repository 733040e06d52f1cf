"""The header of a Megatron index, and the check of both files against it. The format is described in `indexed`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from zerokara.errors import Fault, UserError
from zerokara.tokens.layout import bin_path, idx_path

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
INDEX_BYTES = 20
"""Index bytes of one document, after the header."""
TYPE_NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Type of the ids by its code."""


@dataclass(frozen=True)
class Header:
    """The first 34 bytes of an .idx."""

    type_name: str
    num_sequences: int
    num_documents: int

    @property
    def id_bytes(self) -> int:
        """Bytes of one id."""
        return int(self.type_name.strip("uint")) // 8


def read_header(prefix: Path) -> Header:
    """Read the header, and check that both files are as long as it says.

    Raises:
        UserError: a file is missing, truncated, or no token file.
    """
    index, data = idx_path(prefix), bin_path(prefix)
    for path in (index, data):
        if not path.is_file():
            raise UserError(Fault(where=str(path), rule="does not exist", remedy="create it with step 2"))
    with open(index, "rb") as file:
        start = file.read(HEADER.size)
        if len(start) < HEADER.size or not start.startswith(MAGIC):
            raise _damaged(index, "does not start as a Megatron index does")
        _, version, code, num_sequences, num_indices = HEADER.unpack(start)
        if version != VERSION or code not in TYPE_NAMES or num_indices < 1:
            raise _damaged(index, f"has version {version} and type {code}; version 1 and types 1-5, 8 are known")
        expected = HEADER.size + num_sequences * 12 + num_indices * 8
        if index.stat().st_size != expected:
            raise _damaged(index, f"is {index.stat().st_size:,} bytes long; its header says {expected:,}")
        header = Header(TYPE_NAMES[code], num_sequences, num_indices - 1)
        expected_data = 0
        if num_sequences:
            file.seek(HEADER.size + (num_sequences - 1) * 4)
            (length,) = struct.unpack("<i", file.read(4))
            file.seek(HEADER.size + num_sequences * 12 - 8)
            (pointer,) = struct.unpack("<q", file.read(8))
            expected_data = pointer + length * header.id_bytes
    if data.stat().st_size != expected_data:
        raise _damaged(data, f"is {data.stat().st_size:,} bytes long; {index.name} says {expected_data:,}")
    return header


def _damaged(path: Path, rule: str) -> UserError:
    return UserError(Fault(where=str(path), rule=rule, remedy="create it again: step 2 with --redo"))
