"""Reading .gz and .zst so that everything readable is kept when the file is cut off or damaged.

The libraries' own readers raise in the middle of a read and drop what that read had unpacked already. This one gives
all the bytes there are, then ends, and says in `damage` why it ended. Memory is a buffer and the packing's own window
(32 KiB for gzip; what the frame asks for, up to 2 GiB, for zstd), however much a byte unpacks to.

A file may hold several gzip members or zstd frames, one after another, which read as one; so `cat a.gz b.gz`, bgzip
and pzstd files are whole. Sources: gzip, RFC 1952 (zero bytes after the last member are padding); zstd, RFC 8878 (its
skippable frames hold no data). zstd comes from the standard library (Python 3.14) or its back-port `backports.zstd`.
"""

from __future__ import annotations

import io
import sys
import zlib
from types import ModuleType
from typing import IO, TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Packing = Literal["none", "gzip", "zstd"]
_CHUNK_BYTES = 64 * 1024
_GZIP_HEADER = 31
"""zlib's `wbits` for a gzip member with a window of any size."""
_MAX_WINDOW_LOG = 31
"""The longest windows of zstd (``zstd --long=31``), beyond the 27 that a reader takes unasked."""


class _Member(Protocol):
    """What unpacks one gzip member or zstd frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, packed: bytes, limit: int) -> bytes: ...


class _GzipMember:
    """zlib's object, made to keep the input that it has not come to."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=_GZIP_HEADER)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    def decompress(self, packed: bytes, limit: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + packed, limit)


def zstd_module() -> ModuleType:
    """The standard library's zstd, or its back-port."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


class PackedReader(io.RawIOBase):
    """The unpacked bytes of a packed file; wrap it in an `io.BufferedReader` to read lines."""

    def __init__(self, packed: IO[bytes], packing: Packing):
        self.damage = ""
        """Why the reading ended before the end, or empty."""
        self._packed, self._is_gzip = packed, packing == "gzip"
        self._zstd = None if self._is_gzip else zstd_module()
        self._error: type[Exception] = self._zstd.ZstdError if self._zstd else zlib.error
        self._member: _Member | None = None
        self._member_start = self._given = self._skip = 0
        # `_input` is read and not yet fed; it begins at `_position` of the packed file.
        self._input = self._unpacked = b""
        self._position = self._fed_from = self._farthest = 0
        self._careful_from: int | None = None

    @property
    def packed_bytes(self) -> int:
        """How far into the packed file the reading has come."""
        return max(self._farthest, self._position)

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer as far as one step goes; 0 at the end, and at the first damage."""
        view = memoryview(buffer).cast("B")
        while not self._unpacked and not self.damage and self._step(len(view)):
            pass
        count = min(len(view), len(self._unpacked))
        view[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count

    def _step(self, limit: int) -> bool:
        """Unpack at most `limit` bytes further; False when nothing more comes."""
        packed = b""
        if self._member is None or self._member.eof:
            packed = self._next_input()
            if not packed:
                return False
            if self._member is not None and self._is_gzip and packed[0] == 0:
                stripped = packed.lstrip(b"\0")
                self._put_back(stripped)
                return True
            self._begin(self._fed_from)
        elif self._member.needs_input:
            packed = self._next_input()
        member = self._member
        assert member is not None
        asked = not packed and member.needs_input
        try:
            unpacked = member.decompress(packed, limit)
        except self._error as error:
            self._go_back(str(error))
            return not self.damage
        if asked and not unpacked and not member.eof:
            self.damage = "the file ends in the middle"
            return False
        if member.eof:
            self._put_back(member.unused_data)
        dropped = min(self._skip, len(unpacked))
        self._skip -= dropped
        self._unpacked = unpacked[dropped:]
        self._given += len(self._unpacked)
        return True

    def _begin(self, start: int) -> None:
        """Begin the member that stands at byte `start`."""
        if self._zstd is not None:
            window = {self._zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
            self._member = self._zstd.ZstdDecompressor(options=window)
        else:
            self._member = _GzipMember()
        self._member_start, self._given = start, 0

    def _go_back(self, message: str) -> None:
        """After an error: unpack the member once more, byte by byte where it is near.

        What an unpacker had made before the error in that very call is lost with it; a call that is fed one byte has
        made nothing before.
        """
        if self._careful_from is not None:
            self.damage = message
            return
        given, start = self._given, self._member_start
        self._careful_from, self._farthest = self._fed_from, self._position
        self._packed.seek(start)
        self._input, self._position = b"", start
        self._begin(start)
        self._given = self._skip = given

    def _next_input(self) -> bytes:
        if not self._input:
            self._input = self._packed.read(_CHUNK_BYTES)
        packed, self._input = self._input, b""
        if self._careful_from is not None:
            near = max(1, self._careful_from - self._position)
            packed, self._input = packed[:near], packed[near:]
        self._fed_from = self._position
        self._position += len(packed)
        return packed

    def _put_back(self, rest: bytes) -> None:
        self._position -= len(rest)
        self._input = rest + self._input
