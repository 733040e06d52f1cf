"""Reading .gz so that everything readable is kept when the file is cut off or damaged.

The standard library's reader raises in the middle of a read and drops what that read had unpacked already. This one
gives all the bytes there are, then ends, and says in `damage` why it ended.
Source: the gzip format, RFC 1952 (a file may hold several members, and zero bytes after the last).
"""

from __future__ import annotations

import io
import zlib
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_CHUNK_BYTES = 64 * 1024
_SALVAGE_BYTES = 32
_GZIP_HEADER = 31
"""zlib's `wbits` for a gzip member with a window of any size."""


class GzipReader(io.RawIOBase):
    """The unpacked bytes of a gzipped file; wrap it in an `io.BufferedReader` to read lines."""

    def __init__(self, packed: IO[bytes]):
        self.damage = ""
        """Why the reading ended before the end, or empty."""
        self._packed = packed
        self._member = zlib.decompressobj(wbits=_GZIP_HEADER)
        self._begun = False
        self._input = self._unpacked = b""

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer as far as one step goes; 0 at the end, and at the first damage."""
        view = memoryview(buffer).cast("B")
        while not self._unpacked and not self.damage:
            packed = self._input or self._packed.read(_CHUNK_BYTES)
            if self._member.eof:
                packed = packed.lstrip(b"\0") if packed else packed
                if packed:
                    self._member = zlib.decompressobj(wbits=_GZIP_HEADER)
                elif not self._input:
                    return 0
                self._input = packed
                continue
            self._unpacked = self._unpack(packed, len(view))
            if not packed and not self._unpacked:
                self.damage = "the file ends in the middle" if self._begun else ""
                break
            self._begun = True
        count = min(len(view), len(self._unpacked))
        view[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count

    def _unpack(self, packed: bytes, limit: int) -> bytes:
        before = self._member.copy()
        try:
            unpacked = self._member.decompress(packed, limit)
        except zlib.error as error:
            self.damage = str(error)
            return _salvage(before, packed)
        self._input = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
        return unpacked


def _salvage(member: zlib._Decompress, packed: bytes) -> bytes:
    """What can be unpacked before the damage."""
    unpacked = []
    for start in range(0, len(packed), _SALVAGE_BYTES):
        try:
            unpacked.append(member.decompress(packed[start : start + _SALVAGE_BYTES]))
        except zlib.error:
            break
    return b"".join(unpacked)
