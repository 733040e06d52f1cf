"""A reader of .gz and .zst that gives what can be read of a file that is truncated or damaged.

It returns all bytes before the end of a truncated file, and all but the last 64 KiB of compressed ones before a damage;
then it ends, with the reason in `damage`. It takes a buffer and a window (of zstd at most 128 MiB: a frame that asks
for more counts as damaged), however much a byte unpacks to. As with gzip(1) and zstd(1), nothing is read behind a
damaged member or frame; other bytes after the last one cost no text and are reported. Sources: RFC 1952 (zero bytes
after the last gzip member are padding); RFC 8878 (skippable zstd frames hold no data).
"""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Compression = Literal["none", "gzip", "zstd"]
_CHUNK_BYTES, _PIECE_BYTES = 64 * 1024, 1024 * 1024
"""Maximum number of compressed bytes fed, and of unpacked bytes returned, at once."""
_MAX_WINDOW_LOG = 27
"""zstd(1)'s own limit without further options: 128 MiB in every worker, which ``zstd --long=27`` needs."""
_GZIP_MAGIC, _ZSTD_MAGIC, _SKIPPABLE_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"
CUT = "the file ends in the middle, and how much is missing is unknown"


def zstd_module() -> ModuleType:
    """zstd of the standard library, or its back-port."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


class CompressedReader(io.RawIOBase):
    """Stream of the unpacked bytes of a compressed file; wrap it in an `io.BufferedReader` to read lines.

    If `damage` is not empty at the end, only the first `verified_bytes` of the file are certain. A member whose
    checksum fails or is never reached may have unpacked to nonsense for long; of a file that ends too early nothing is
    certain, for nobody knows how much is missing.
    """

    def __init__(self, packed: IO[bytes], compression: Compression, name: str):
        self.name, self.damage = name, ""
        self.verified_bytes = self.packed_bytes = 0
        """Compressed bytes read so far."""
        self._packed, self._is_gzip = packed, compression == "gzip"
        self._pieces, self._piece = self._unpacked(), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a part of the buffer; return 0 at the end, and at the first damage."""
        view = memoryview(buffer).cast("B")
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._piece = memoryview(piece)
        count = min(len(view), len(self._piece))
        view[:count], self._piece = self._piece[:count], self._piece[count:]
        return count

    def _unpacked(self) -> Iterator[bytes]:
        """Yield the unpacked bytes of all members, up to the first damage; those of the call that fails are lost."""
        position, error_of_library = 0, zlib.error if self._is_gzip else zstd_module().ZstdError
        while head := self._head(start := position):
            if start and self._is_gzip and head[0] == 0:
                position += len(head) - len(head.lstrip(b"\0"))
                continue
            if start and not self._is_magic(head):
                self.damage = f"what follows its last member is no {'gzip' if self._is_gzip else 'zstd'}"
                self.verified_bytes = start
                return
            member, has_begun = self._decompressor(), False
            try:
                while not member.eof:
                    left = getattr(member, "unconsumed_tail", b"")  # zlib's; zstd keeps it
                    if needs_input := getattr(member, "needs_input", not left):
                        left = self._packed.read(_CHUNK_BYTES)
                        position += len(left)
                        self.packed_bytes = max(self.packed_bytes, position)
                    piece = member.decompress(left, _PIECE_BYTES)
                    if needs_input and not left and not piece and not member.eof:
                        self.damage, self.verified_bytes = CUT, 0
                        return
                    has_begun = has_begun or bool(piece)
                    yield piece
            except error_of_library as error:
                self.damage, self.verified_bytes = str(error), start
                if not self._is_gzip and self._is_magic(head) and not has_begun:
                    again = f"zstd -dc --long=31 {self.name} | zstd --long={_MAX_WINDOW_LOG} -o NEW.zst"
                    self.damage += f"; if it needs more than 128 MiB or a dictionary (-D), compress it again: {again}"
                return
            position -= len(member.unused_data)
        if not position:  # as an interrupted copy leaves it
            self.damage = "the file is empty"

    def _head(self, start: int) -> bytes:
        """Return the first bytes of a member, from which the reading begins."""
        self._packed.seek(start)
        head = self._packed.read(4096)
        self._packed.seek(start)
        return head

    def _is_magic(self, head: bytes) -> bool:
        """Tell whether a member begins like this, as far as it goes."""
        if self._is_gzip:
            return _GZIP_MAGIC.startswith(head[:2])
        is_skippable = 0x50 <= head[0] <= 0x5F and _SKIPPABLE_MAGIC.startswith(head[1:4])
        return is_skippable or _ZSTD_MAGIC.startswith(head[:4])

    def _decompressor(self) -> Any:
        if self._is_gzip:
            return zlib.decompressobj(wbits=31)  # a gzip member with a window of any size
        module = zstd_module()
        return module.ZstdDecompressor(options={module.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})
