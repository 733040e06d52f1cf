"""A plain or packed file as a stream of lines that knows its position, and the cache that keeps such a stream open.

Positions are bytes of the unpacked stream. To read range after range of a packed file, pass the same `OpenStreams` to
each reading: the next range continues where the last one ended, instead of unpacking everything before it again.
"""

from __future__ import annotations

import io
from typing import IO

from zerokara.corpus.inputs import InputFile
from zerokara.corpus.packed import PackedReader

BUFFER_BYTES = 1024 * 1024


class LineStream:
    """The lines of one file, with the current position."""

    def __init__(self, file: InputFile):
        self.file = file
        self._raw = file.open(BUFFER_BYTES)
        self._packed = None if file.packing == "none" else PackedReader(self._raw, file.packing, file.name)
        self.bytes: IO[bytes] = self._raw if self._packed is None else io.BufferedReader(self._packed, BUFFER_BYTES)
        self.position = 0
        """The next byte to be read: the start of a line unless `inside_line`."""
        self.inside_line = False
        self.free_from = 0
        """No line starts from here up to `position`."""
        self.ended = False
        """Whether the end was met."""

    @property
    def damage(self) -> str:
        """Why a packed stream ends early, or empty; known as soon as the buffer reaches that place."""
        return self._packed.damage if self._packed else ""

    @property
    def lost_bytes(self) -> int:
        """Bytes on disk that cannot be read: those from the damage on."""
        return max(0, self.file.bytes - self._packed.damaged_at) if self._packed and self._packed.damage else 0

    @property
    def unverified_bytes(self) -> int:
        """Bytes on disk that were read before a damage but may be wrong or incomplete."""
        return self._packed.damaged_at - self._packed.unverified_from if self._packed else 0

    @property
    def disk_position(self) -> int:
        """Position in the file on disk; its end if the rest is unreadable."""
        if self._packed is None:
            return self.position
        return self.file.bytes if self.ended and self._packed.damage else self._packed.packed_bytes

    def go_to(self, start: int, end: int | None) -> None:
        """Go to the first line that starts at `start` or later; in a plain file not far beyond `end`.

        A packed stream is kept open for the next range, so nothing is read twice; a plain file is not, and each of its
        ranges inside one very long line would read that line to its end.
        """
        if self._packed is not None:
            end = None
        if self.position < start:
            # One byte before: if it is a line's last, the next line is the first of the range.
            self._skip(start - 1 - self.position)
            self.inside_line = True
        while self.inside_line and not self.ended and (end is None or self.position < end):
            self._read_on()

    def skip_line(self) -> bool:
        """Skip the rest of the line; return whether it had an end."""
        self.inside_line = True
        while self.inside_line and not self.ended:
            self._read_on()
        return not self.ended

    def close(self) -> None:
        """Close the file."""
        self.bytes.close()
        self._raw.close()

    def _read_on(self) -> None:
        piece = self.bytes.readline(BUFFER_BYTES)
        self.position += len(piece)
        self.ended = not piece
        self.inside_line = not piece.endswith(b"\n")

    def _skip(self, count: int) -> None:
        if self._packed is None:
            self.position = self.bytes.seek(self.position + count)
            return
        while count and not self.ended:
            piece = self.bytes.read(min(count, BUFFER_BYTES))
            self.position += len(piece)
            count -= len(piece)
            self.ended = not piece


class OpenStreams:
    """A cache of the packed stream that was read last; close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._kept: LineStream | None = None

    def take(self, file: InputFile, start: int) -> LineStream | None:
        """Hand over the kept stream if it can continue with a range of this file from `start`, else None."""
        kept = self._kept
        if kept is None or kept.file != file or start < kept.free_from:
            return None
        self._kept = None
        return kept

    def keep(self, stream: LineStream) -> None:
        """Keep a stream for the next range of its file, in place of the one kept before."""
        self.close()
        self._kept = stream

    def close(self) -> None:
        """Close what is kept."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def __enter__(self) -> OpenStreams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
