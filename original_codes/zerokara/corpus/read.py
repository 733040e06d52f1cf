"""Parts of corpus files → documents and bad lines, streaming, in constant memory; the one reader of all steps.

Plain files of lines are cut into byte ranges, and a range owns every line that *starts* in it. A .parquet is cut by its
row groups; a compressed file of lines is unpacked into blocks of whole lines; a .txt file that is one document is read
whole. Each line gives one item, and the items' bytes add up to the (unpacked) file. A damaged compressed file gives all
that can be read, then one item for the damage: the line in which it breaks off, or one more.
"""

import io
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TypeVar

from zerokara.base.progress import Progress
from zerokara.corpus import documents
from zerokara.corpus.compressed import CompressedReader
from zerokara.corpus.documents import BadLine, Document, Reason, TxtDocument, excerpt, text_of_json, text_of_line
from zerokara.corpus.find import InputFile

T = TypeVar("T")
BUFFER_BYTES = 1024 * 1024
PART_BYTES = 8 * 1024 * 1024
"""Bytes of a file that are read at a time, where it can be cut."""
MAX_REMOTE_FOOTERS = 64
"""Maximum number of remote .parquet files that are cut: each takes some tenths of a second for its footer."""
SAMPLE_FILES = 16
"""Files of each source and format that are sampled for their unpacked size."""
_HEAD_BYTES, _MAX_UNPACKED_HEAD = 256 * 1024, 64 * 1024 * 1024
"""Size of the head of a compressed file, and of what is unpacked of it (zeros compress to nothing)."""


@dataclass(frozen=True)
class Range:
    """Lines of a file that start from `start` to before `end`, in bytes, or row groups of a .parquet; None: the end."""

    file: InputFile
    start: int = 0
    end: int | None = None
    row_group_bytes: int | None = None
    """Bytes on disk of the row groups, where they were counted."""

    @property
    def disk_bytes(self) -> int:
        if self.row_group_bytes is not None:
            return self.row_group_bytes
        return (self.file.bytes if self.end is None else self.end) - self.start


@dataclass(frozen=True)
class Block:
    """Consecutive whole lines of a compressed file, unpacked."""

    file: InputFile
    start: int
    """Byte of the unpacked stream at which the first line starts; `first_line` is its number in the file, from 1."""
    first_line: int
    content: bytes
    last: BadLine | None
    """What follows the content and is no document: a line that is too long to be loaded, or the damage."""
    disk_bytes: int
    """Bytes on disk that were read for this block; those of all blocks add up to the file."""
    is_last: bool


def is_one_document(file: InputFile, txt_document: TxtDocument) -> bool:
    return file.format == "txt" and txt_document == "file"


def has_unknown_size(file: InputFile, txt_document: TxtDocument) -> bool:
    """True for a compressed file of lines: its unpacked size is unknown until it is read."""
    return file.is_compressed and not is_one_document(file, txt_document)


def ranges(files: Sequence[InputFile], target_bytes: int, txt_document: TxtDocument = "file") -> list[Range]:
    """Cut files into ranges of about `target_bytes`, in corpus order; those that cannot be cut stay whole.

    Raises OSError if the footer of a .parquet cannot be read from the disk or the network.
    """
    cut: list[Range] = []
    far = sum(file.format == "parquet" and file.remote is not None for file in files) > MAX_REMOTE_FOOTERS
    for file in files:
        whole = file.is_compressed or is_one_document(file, txt_document) or (far and file.format == "parquet")
        if whole or file.bytes <= target_bytes:
            cut.append(Range(file))
        elif file.format == "parquet":
            from zerokara.corpus import tables  # pyarrow: only where there is such a file

            parts = tables.gathered_row_groups(file, target_bytes)
            cut.extend(Range(file, start, end, size) for start, end, size in parts)
        else:
            starts = range(0, file.bytes, max(1, target_bytes))
            cut.extend(Range(file, start, min(start + starts.step, file.bytes)) for start in starts)
    return cut


def gathered(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield groups of consecutive items whose sizes add up to `most` at most; a larger item is a group by itself."""
    group, total = list[T](), 0
    for item in items:
        size = size_of(item)
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group


def blocks(file: InputFile, block_bytes: int) -> Iterator[Block]:
    """Unpack a file of lines block by block; each ends with the first line end at or after `block_bytes`.

    A line that is too long ends its block and is not loaded, so that a block holds `block_bytes` and a line at most.
    Raises OSError with the name of the file if it or the network fails.
    """
    limit = documents.MAX_LINE_BYTES
    with file.open(BUFFER_BYTES) as raw:
        packed = CompressedReader(raw, file.compression, file.name)
        stream = io.BufferedReader(packed, 64 * 1024)
        start, first_line, told, is_last = 0, 1, 0, False
        while not is_last:
            content = stream.read(block_bytes)
            whole = content.rfind(b"\n") + 1
            rest = stream.readline(limit + 1) if content[whole:] else b""
            line = content[whole:] + rest
            skipped, has_end = _skip_line(stream) if line and not line.endswith(b"\n") else (0, True)
            is_last, size, last = not stream.peek(1), len(line) + skipped, None
            is_too_long, is_damaged = len(line) > limit, is_last and bool(packed.damage)
            if is_too_long or (is_damaged and not has_end):
                content = content[:whole]
            else:
                content, size = content + rest, 0
            disk_bytes = file.bytes - told if is_last else max(0, packed.packed_bytes - told)
            place = first_line + content.count(b"\n"), start + len(content)
            if is_damaged and not (is_too_long and has_end):
                last = _damaged(file, packed, *place, size)
            elif is_too_long:
                is_last = is_last and not is_damaged  # which is told next, in a block by itself
                lost = disk_bytes * size // (len(content) + size)
                last = BadLine(file, *place, Reason.TOO_LONG, excerpt(line), size, lost_bytes=lost)
            yield Block(file, start, first_line, content, last, disk_bytes, is_last)
            told += disk_bytes
            first_line, start = (place[0] + 1, place[1] + size) if last else place


def read_files(
    files: Sequence[InputFile], label: str, text_field: str, txt_document: TxtDocument, part_bytes: int = PART_BYTES
) -> Iterator[Document | BadLine]:
    """Yield the documents and bad lines of files in order, with a progress bar of this label. Raises as `read`."""
    with Progress(label, sum(file.bytes for file in files), unit="B") as progress:
        for whole in ranges(files, part_bytes, txt_document):
            for part in blocks(whole.file, part_bytes) if has_unknown_size(whole.file, txt_document) else [whole]:
                yield from read(part, text_field, txt_document)
                progress.advance(part.disk_bytes)


def read(
    part: Range | Block, text_field: str = "text", txt_document: TxtDocument = "file"
) -> Iterator[Document | BadLine]:
    """Yield the documents and bad lines of a range or a block in order; lines of a block are counted in the file.

    Raises OSError with the name of the file if it or the network fails.
    """
    file = part.file
    if isinstance(part, Block):
        content = io.BytesIO(part.content)
        yield from _of_lines(file, content, part.start, sys.maxsize, part.first_line, text_field)
        yield from [part.last] if part.last else []
    elif file.format == "parquet":
        from zerokara.corpus import tables  # pyarrow: only where there is such a file

        yield from tables.read_rows(file, part.start, part.end, text_field)
    elif is_one_document(file, txt_document):
        yield _of_whole_file(file)
    elif file.is_compressed:
        for block in blocks(file, BUFFER_BYTES):
            yield from read(block, text_field)
    else:
        end = sys.maxsize if part.end is None else part.end
        with file.open(BUFFER_BYTES) as lines:
            # One byte before: if it is a line's last, the next line is the first of the range.
            position = lines.seek(max(0, part.start - 1))
            position += _skip_line(lines, end - position)[0] if part.start else 0
            yield from _of_lines(file, lines, position, end, 1, text_field)


def _of_lines(
    file: InputFile, lines: IO[bytes], position: int, end: int, number: int, text_field: str
) -> Iterator[Document | BadLine]:
    """Items of the lines that start before `end`; the next is line `number`, at `position`."""
    readline, limit, is_json = lines.readline, documents.MAX_LINE_BYTES, file.format == "jsonl"
    new = tuple.__new__  # as Document(...), without its detour through Python
    while position < end:
        line = readline(limit + 1)
        size = len(line)
        if size > limit:
            size += 0 if line.endswith(b"\n") else _skip_line(lines)[0]
            yield BadLine(file, number, position, Reason.TOO_LONG, excerpt(line), size, lost_bytes=size)
        elif not line:
            return
        else:
            text = text_of_json(line, text_field) if is_json else text_of_line(line)
            if type(text) is str:  # and no Reason, which is a str of its own class
                yield new(Document, (text, file, number, position, size))
            else:
                yield BadLine(file, number, position, Reason(text), excerpt(line), size)
        number += 1
        position += size


def _skip_line(lines: IO[bytes], enough: int = sys.maxsize) -> tuple[int, bool]:
    """Skip the rest of a line, or at least `enough` bytes of it; return their number, and True if its end was met."""
    size, piece = 0, b""
    while size < enough and not piece.endswith(b"\n") and (piece := lines.readline(BUFFER_BYTES)):
        size += len(piece)
    return size, piece.endswith(b"\n")


def _of_whole_file(file: InputFile) -> Document | BadLine:
    with file.open(BUFFER_BYTES) as raw:
        packed = CompressedReader(raw, file.compression, file.name) if file.is_compressed else None
        content = (io.BufferedReader(packed, BUFFER_BYTES) if packed else raw).read(documents.MAX_LINE_BYTES + 1)
    size = len(content)
    if size > documents.MAX_LINE_BYTES:  # the file is this one item, so any size stands for all of a compressed file
        size = size if packed else file.bytes
        return BadLine(file, 1, 0, Reason.TOO_LONG, excerpt(content), size, lost_bytes=file.bytes)
    if packed and packed.damage:
        return _damaged(file, packed, 1, 0, size)
    text, offset = documents.text_of_file(content)
    if isinstance(text, Reason):
        lost = 0 if text in (Reason.EMPTY_LINE, Reason.EMPTY_TEXT) else file.bytes
        return BadLine(file, 1, offset, text, excerpt(content[offset:]), size, lost_bytes=lost)
    return Document(text, file, 1, 0, size)


def _damaged(file: InputFile, packed: CompressedReader, line: int, start: int, size: int) -> BadLine:
    """Item for the damage of a compressed file; `size` is the size of the truncated line."""
    return BadLine(file, line, start, Reason.DAMAGED, packed.damage, size, 1, file.bytes - packed.verified_bytes)


def total_plain_bytes(files: Sequence[InputFile], text_field: str = "text") -> int:
    """Unpacked size of files, to some ten percent, by a sample of each format; of a .parquet that of its text alone."""
    alike: dict[tuple[int, str, str], list[InputFile]] = defaultdict(list)
    for file in files:
        if file.bytes:
            alike[file.source, file.format, file.compression].append(file)
    total = 0
    for members in alike.values():
        sampled = members[:: -(-len(members) // SAMPLE_FILES)]
        unpacked = sum(_plain_bytes(file, text_field) for file in sampled)
        total += unpacked * sum(file.bytes for file in members) // sum(file.bytes for file in sampled)
    return total


def _plain_bytes(file: InputFile, text_field: str) -> int:
    """Of a compressed file guessed from its beginning."""
    if file.format == "parquet":
        from zerokara.corpus import tables  # pyarrow: only where there is such a file

        return tables.text_bytes(file, text_field)
    if not file.is_compressed:
        return file.bytes
    with file.open(_HEAD_BYTES) as raw:
        head = raw.read(_HEAD_BYTES)
    reader = CompressedReader(io.BytesIO(head), file.compression, file.name)
    unpacked, buffer = 0, bytearray(BUFFER_BYTES)
    while unpacked < _MAX_UNPACKED_HEAD and (count := reader.readinto(buffer)):
        unpacked += count
    return round(file.bytes * unpacked / reader.packed_bytes) if unpacked else file.bytes
