"""Reading .gz and .zst such that nothing readable is lost when the file is truncated or damaged.

The libraries' own readers raise in the middle of a read and drop what that read had unpacked already. This one returns
all readable bytes, then ends, with the reason in `damage` and in `damaged_at` the packed byte from which on nothing
could be read. Memory is a buffer and the packing's own window (32 KiB for gzip; what the frame asks for, up to
128 MiB, for zstd), however much a byte unpacks to.

A file may hold several gzip members or zstd frames, one after another, which read as one; so `cat a.gz b.gz`, bgzip
and pzstd files are whole. As with gzip(1) and zstd(1), nothing is read behind a damaged member; other bytes after the
last one ("trailing garbage") cost no text and are reported. An empty file is a damaged one, as an interrupted copy
leaves it. Sources: gzip, RFC 1952 (zero bytes after the last member are padding); zstd, RFC 8878 (its
skippable frames hold no data). zstd comes from the standard library (Python 3.14) or its back-port `backports.zstd`.
"""

from __future__ import annotations

import io
import sys
import zlib
from types import ModuleType
from typing import IO, TYPE_CHECKING, Literal, Protocol

from zerokara.errors import Fault, UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Packing = Literal["none", "gzip", "zstd"]
_CHUNK_BYTES = 64 * 1024
_GZIP_HEADER = 31
"""zlib's `wbits` for a gzip member with a window of any size."""
_MAX_WINDOW_LOG = 27
"""zstd(1)'s own limit without further options: 128 MiB in every worker, which ``zstd --long=27`` needs."""
_LONGEST_WINDOW_LOG = 31
"""No zstd writes longer ones (``--ultra --long=31``): a header with more is damaged."""
_ZSTD_MAGIC, _SKIPPABLE_MAGIC = b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"
CUT = "the file ends in the middle, and how much is missing is unknown"
_HEADER_BYTES = 18
"""The longest header of a zstd frame."""


class _Member(Protocol):
    """An unpacker of one gzip member or zstd frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, packed: bytes, limit: int) -> bytes: ...


class _GzipMember:
    """zlib's decompressor, which keeps the input that it has not consumed."""

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


def window_bytes(header: bytes) -> int:
    """The window of a zstd frame in bytes, from its header (RFC 8878, 3.1.1.1); 0 if this is not a frame's header.

    After the magic number stand a descriptor and, unless its "single segment" bit is set, a byte of 5 bits exponent and
    3 bits mantissa: 2**(10 + exponent) * (1 + mantissa / 8). A single segment asks for as much as it holds, which
    stands after the dictionary's id.
    """
    if not header.startswith(_ZSTD_MAGIC) or len(header) < 6:
        return 0
    descriptor = header[4]
    if not descriptor & 0x20:
        return (8 + (header[5] & 7)) << (7 + (header[5] >> 3))
    start = 5 + (0, 1, 2, 4)[descriptor & 3]
    size = (1, 2, 4, 8)[descriptor >> 6]
    return int.from_bytes(header[start : start + size], "little") + (256 if size == 2 else 0)


def _may_begin(header: bytes, packing: Packing) -> bool:
    """Whether a member or frame may begin like this; the file may end within the header."""
    if packing == "gzip":
        return b"\x1f\x8b".startswith(header[:2])
    skippable = 0x50 <= header[0] <= 0x5F and _SKIPPABLE_MAGIC.startswith(header[1:4])
    return skippable or _ZSTD_MAGIC.startswith(header[:4])


class PackedReader(io.RawIOBase):
    """The unpacked bytes of a packed file; wrap it in an `io.BufferedReader` to read lines."""

    def __init__(self, packed: IO[bytes], packing: Packing, name: str):
        """`name` is the file's, for messages."""
        self.name = name
        self.damage = ""
        """Why the reading ended before the end, or empty."""
        self.damaged_at = 0
        """If so: the packed byte from which on nothing could be read."""
        self.unverified_from = 0
        """If so: the packed byte from which on there may be more wrong than is known. A member whose checksum fails or
        is never reached may have unpacked to anything; of a file that ends too early nobody knows how much is missing,
        so that it is all of it."""
        self._packed, self._packing, self._is_gzip = packed, packing, packing == "gzip"
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
        """Position in the packed file."""
        return max(self._farthest, self._position)

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer as far as one step goes; 0 at the end, and at the first damage.

        Raises:
            UserError: a zstd frame asks for more memory than is given to any.
        """
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
                if self._member is None:
                    self.damage = "the file is empty"
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
            self._stop(CUT, self._position)
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
        """After an error: unpack the member again, byte by byte near the error.

        A call that fails loses what it had unpacked before the error; a call with one byte of input loses nothing.
        """
        if self._careful_from is not None:
            self._stop(message, self._fed_from)
            return
        given, start = self._given, self._member_start
        self._careful_from, self._farthest = self._fed_from, self._position
        self._packed.seek(start)
        self._input, self._position = b"", start
        self._begin(start)
        self._given = self._skip = given

    def _stop(self, message: str, place: int) -> None:
        """Note that nothing can be read from this byte on, or from the member's first byte if it yielded nothing."""
        self.damage, self.damaged_at = message, place
        self.unverified_from = 0 if message == CUT else self._member_start
        if self._given:
            return
        self.damaged_at = self._member_start
        self._packed.seek(self._member_start)
        header = self._packed.read(_HEADER_BYTES)
        window = 0 if self._is_gzip else window_bytes(header)
        if 1 << _MAX_WINDOW_LOG < window < 1 << (_LONGEST_WINDOW_LOG + 1):
            rule = f"can only be unpacked with a window of {window:,} bytes in every process; at most 128 MiB are given"
            unpack, pack = f"zstd -dc --long={_LONGEST_WINDOW_LOG} {self.name}", f"zstd --long={_MAX_WINDOW_LOG}"
            remedy = f"compress it again: {unpack} | {pack} -o NEW.zst"
            raise UserError(Fault(where=self.name, rule=rule, remedy=remedy))
        if self._member_start and not _may_begin(header, self._packing):
            self.damage, self.unverified_from = f"what follows its last member is no {self._packing}", self.damaged_at

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
