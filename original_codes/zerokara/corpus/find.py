"""Entries of a configuration (files, globs, folders, lists, addresses) → the corpus files, in a fixed order.

Each entry is one *source*. Its files are sorted by path, so the same entries give the same corpus on every machine;
the files of a list (``@files.txt``) stand in its order. Links are followed, each folder and each file once: a file has
its real name if that is among those found, else the first, by path, that a link gives it. Notes name what is left out.
"""

from __future__ import annotations

import errno
import glob
import heapq
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from zerokara.corpus.compressed import Compression
from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import Fault, RunError, UserError, holding, nearest, shown
from zerokara.progress import log

if TYPE_CHECKING:  # pydantic, which the reading of a file needs not
    from zerokara import manifest

FileFormat = Literal["jsonl", "txt", "tsv", "parquet"]
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
OTHER_COMPRESSIONS = frozenset({".bz2", ".xz", ".lzma", ".lz4", ".br", ".snappy", ".zip", ".7z", ".zstd", ".gzip"})
"""Text compressed like this is not read, but a note names it."""
OWN_OUTPUT_ENDINGS = ("_quarantine.jsonl", "manifest.json", PARTIAL_SUFFIX)
"""Files that our steps write; they are left out of a folder or a glob."""
_NO_DATA = re.compile(r"/\.|/((dataset_(infos?|dict)|state|croissant)\.json|(readme|license|requirements)\.txt)$", re.I)
"""Hidden files at an address, and those that describe a dataset; still read where an entry names one."""
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://")
_REPEATED = "leads to what is included already; left out"
_PACKED_OTHERWISE = "of a format not known here; left out; compress it as .gz or .zst"


@dataclass(frozen=True)
class Formats:
    """File formats that an entry may name; `text` describes them in messages."""

    of_suffix: Mapping[str, FileFormat]
    text: str

    def of(self, name: str) -> tuple[FileFormat, Compression] | None:
        """Format and compression by a file's name, or None."""
        inner, suffix = os.path.splitext(name.lower())
        if suffix == ".parquet":
            return "parquet", "none"
        compression = _COMPRESSIONS.get(suffix, "none")
        file_format = self.of_suffix.get(suffix if compression == "none" else os.path.splitext(inner)[1])
        return (file_format, compression) if file_format else None

    def is_name(self, name: str) -> bool:
        """True if a file of this name, found in a folder or by a pattern, belongs to the corpus."""
        return not name.startswith(".") and not name.endswith(OWN_OUTPUT_ENDINGS) and self.of(name) is not None

    def is_compressed_otherwise(self, name: str) -> bool:
        """True if the name is that of such a file with one more suffix, as ``.xz``."""
        inner, suffix = os.path.splitext(name)
        return suffix.lower() in OTHER_COMPRESSIONS and self.is_name(inner)


CORPUS = Formats(
    {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".txt": "txt"},
    ".jsonl, .json (one JSON object a line) or .txt, each plain, .gz or .zst, or .parquet",
)
"""Text to pretrain on."""
TABLES = Formats(
    {**CORPUS.of_suffix, ".txt": "tsv", ".tsv": "tsv"},
    ".jsonl, .json (one JSON object a line), .tsv or .txt (columns between tabs, their names in the first line), each "
    "plain, .gz or .zst, or .parquet",
)
"""Records with several fields."""


@dataclass(frozen=True)
class InputFile:
    """One file of the corpus, as the search found it."""

    path: Path
    source: int
    """Index of its entry in the configuration."""
    format: FileFormat
    compression: Compression
    bytes: int
    """Size on disk (compressed)."""
    modified_ns: int
    """0 for a remote file."""
    remote: manifest.FileRecord | None = None
    """Place on the Hub or in an object store; None for a file on a disk."""

    @property
    def name(self) -> str:
        """Name in messages and in JSON files, of a remote file too."""
        return shown(self.path if self.remote is None else self.remote.path)

    @property
    def is_compressed(self) -> bool:
        """True if lines must be decompressed to be read (a .parquet compresses its pages itself)."""
        return self.compression != "none"

    def open(self, buffer_bytes: int) -> BinaryIO:
        """Open the bytes on disk or on a server, as a seekable stream that reads about `buffer_bytes` at once."""
        if self.remote is None:
            return open(self.path, "rb", buffering=buffer_bytes)
        from zerokara.corpus import remote  # takes a while, so only where an entry is an address

        return remote.open_file(self.remote, buffer_bytes)


def find_files(entries: Sequence[str], where: str, formats: Formats = CORPUS) -> list[InputFile]:
    """Find the files of every entry, in corpus order; `where` is the place of the entries in the configuration.

    Raises UserError for an entry without a file, an unknown format, a file named twice, and a corpus without a byte.
    """
    faults, files, first_entry = list[Fault](), list[InputFile](), dict[str, str]()
    for source, entry in enumerate(entries):
        for line, place in _lines_of(entry, where, faults):
            try:
                found = _files_of(line, place, source, formats)
            except UserError as error:
                faults += error.faults
                continue
            # The same documents twice would put one document into both training and validation.
            if again := [real for real in found if real in first_entry]:
                names = _first_of([found[real].name for real in again])
                rule = f"names {names}, which {shown(first_entry[again[0]])} names already"
                faults.append(Fault(where=place, value=shown(line), rule=rule, remedy="name each file once"))
            first_entry = dict.fromkeys(found, line) | first_entry
            files.extend(found.values())
    if closed := [file.name for file in files if file.remote is None and not os.access(file.path, os.R_OK)]:
        faults.append(Fault(_first_of(closed), "you may not read this"))
    if not faults and not any(file.bytes for file in files):
        faults.append(Fault(where, f"the corpus is empty: {len(files)} files, 0 bytes"))
    if faults:
        raise UserError(faults)
    return files


def check_unchanged(files: Sequence[InputFile]) -> None:
    """Raise RunError or OSError if a file on a disk has changed since it was found; `remote` checks the others."""
    for file in (file for file in files if file.remote is None):
        status = file.path.stat()
        if (status.st_size, status.st_mtime_ns) != (file.bytes, file.modified_ns):
            changed = f"{file.name} changed while it was read (it had {file.bytes:,} bytes, now {status.st_size:,})"
            raise RunError(f"{changed}; nothing was written; run again when it is complete")


def for_manifest(files: Sequence[InputFile]) -> list[Path | manifest.FileRecord]:
    """Inputs of a `manifest.StepSpec` for the files."""
    return [file.remote or file.path for file in files]


def _lines_of(entry: str, where: str, faults: list[Fault]) -> Iterator[tuple[str, str]]:
    """Yield an entry with its place; or those of a list, one a line, relative to its folder; ``#`` marks comments."""
    if not entry.startswith("@") or Path(entry).exists():
        yield entry, where
        return
    path = Path(os.path.expanduser(entry[1:]))  # that of Path raises where there is no such user
    try:
        lines = enumerate(map(str.strip, path.read_text(encoding="utf-8-sig").splitlines()), 1)
    except (OSError, UnicodeDecodeError) as error:
        rule = f"the list {shown(path.absolute())} cannot be read: {getattr(error, 'strerror', 'it is not UTF-8 text')}"
        faults.append(Fault(where, rule, value=shown(entry), remedy="" if path.exists() else nearest(path)))
        return
    named = {f"{shown(path)}:{number}": line for number, line in lines if line and not line.startswith("#")}
    if not named:
        rule = f"the list {shown(path.absolute())} names no file"
        faults.append(Fault(where, rule, value=shown(entry), remedy="write one file, glob or folder a line"))
    for place, line in named.items():
        if line.startswith("@"):
            faults.append(Fault(place, "a list cannot name another list", value=line))
        else:
            yield line if _ADDRESS.match(line) else os.path.join(path.parent, os.path.expanduser(line)), place


def _files_of(entry: str, where: str, source: int, formats: Formats) -> dict[str, InputFile]:
    """Files of an entry by their real paths, or by their addresses."""
    if _ADDRESS.match(entry):
        return _files_at(entry, where, source, formats)
    if not entry.strip():
        raise UserError(Fault(where, "an entry is empty", remedy="name a file, a folder or a pattern"))
    path = Path(os.path.expanduser(entry))
    if path.is_file():
        found = {os.path.realpath(path): path}
    elif path.exists() and not path.is_dir():
        rule = "is a pipe, a socket or a device; a corpus is read more than once"
        raise UserError(Fault(where, rule, value=shown(entry), remedy="write it into a file"))
    else:
        found = _search(path, formats, where)
    files = {
        real: InputFile(path, source, *kind, status.st_size, status.st_mtime_ns)
        for path, real in sorted((path, real) for real, path in found.items())
        if (status := path.stat()) and (kind := formats.of(path.name))
    }
    if not files:
        rule, remedy = f"names no file of a format known here: {formats.text}", nearest(path)
        if not os.path.lexists(path) and not (glob.has_magic(entry) and path.parent.is_dir()):
            rule = "there is no such file or folder"
        if path == Path("data/embedded/corpus.jsonl"):  # of the shipped configuration
            remedy = f"make it with: .venv/bin/python -m zerokara.corpus.embedded {path}"
        raise UserError(Fault(where, rule, value=shown(entry), remedy=remedy))
    return files


def _files_at(address: str, where: str, source: int, formats: Formats) -> dict[str, InputFile]:
    """Files at an address, by their addresses."""
    from zerokara.corpus import remote  # takes a while, so only where an entry is an address

    found = {file: file.path.rpartition("/")[2] for file in remote.find(address, where)}
    if other := [file.path for file, name in found.items() if formats.is_compressed_otherwise(name)]:
        log(f"note: {_first_of(other)}: {_PACKED_OTHERWISE}")
    is_one_file = [*found.values()] == [address.rpartition("/")[2]]
    files = {
        file.path: InputFile(Path(file.path), source, *kind, file.bytes, 0, file)
        for file, name in found.items()
        if is_one_file or (formats.is_name(name) and not _NO_DATA.search(file.path))
        if (kind := formats.of(name))
    }
    if not files:
        rule = f"names no file of a format known here: {formats.text}"
        more = remote.CONVERSION if address.startswith(remote.HUB) else ""
        raise UserError(Fault(where, rule, value=address, remedy=f"it {holding(found.values())}{more}"))
    return files


def _search(given: Path, formats: Formats, where: str) -> dict[str, Path]:
    """Wanted files of a folder or a pattern and of all folders below, links last: real path → path."""
    found, folders, faults = dict[str, Path](), dict[str, Path](), dict[Path, str]()
    notes: dict[str, set[str]] = defaultdict(set)

    def take_file(path: Path, real: str, is_file: bool) -> None:
        if formats.is_compressed_otherwise(path.name):
            notes[_PACKED_OTHERWISE].add(str(path))
        elif formats.is_name(path.name) and not is_file:
            notes["a pipe, a socket or a device; left out"].add(str(path))
        elif formats.is_name(path.name) and found.setdefault(real, path) != path:
            notes[_REPEATED].add(str(path))

    waiting: list[tuple[bool, bool, Path, str]] = []  # a heap
    try:
        if os.path.lexists(given):
            waiting = [_turn(str(given))]
        else:
            matches = {str(Path(match)) for match in _matches(os.path.join(".", given))}
            waiting = sorted(_turn(match) for match in matches if PARTIAL_SUFFIX + "/" not in match + "/")
    except OSError as error:
        faults[Path(error.filename)] = f"cannot be looked into: {error.strerror or error}"
    while waiting:
        is_link, _, path, real = heapq.heappop(waiting)
        try:
            mode = os.stat(path).st_mode
            if not stat.S_ISDIR(mode):
                take_file(path, real, stat.S_ISREG(mode))
            elif folders.setdefault(real, path) == path:
                with os.scandir(path) as entries:
                    for entry in entries:
                        if entry.is_symlink() or (entry.is_dir() and not entry.name.endswith(PARTIAL_SUFFIX)):
                            heapq.heappush(waiting, _turn(entry.path))
                        elif not entry.is_dir():
                            take_file(Path(entry.path), os.path.join(real, entry.name), entry.is_file())
            elif is_link:
                notes[_REPEATED].add(str(path))
        except OSError as error:
            if not is_link or error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                faults[path] = f"cannot be looked into: {error.strerror or error}"
            elif formats.is_name(path.name):
                faults[path] = "is a link to nothing"
            elif not path.suffix and not path.name.startswith("."):
                notes["a link to nothing; if it was a folder of the corpus, its text will be missing"].add(str(path))
    if faults:
        first = sorted(faults.items())[:5]
        raise UserError(Fault(where, rule, value=shown(one), remedy="repair it, or remove it") for one, rule in first)
    for why, names in notes.items():
        log(f"note: {_first_of(sorted(map(shown, names)))}: {why}")
    return found


def _turn(path: str) -> tuple[bool, bool, Path, str]:
    """Sorts what stands in its own place first, then what a linked folder leads to, then links."""
    real = os.path.realpath(path)
    return os.path.islink(path), real != os.path.abspath(path), Path(path), real


def _matches(pattern: str, real_above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the matches of a recursive pattern, with a folder before any ``**``; `real_above`: folders it came through.

    `glob.glob` follows a circle of links until the path is too long, and with two such circles never ends.
    """
    before, stars, after = f"{pattern}/".partition("/**/")
    if not stars:
        yield from glob.glob(pattern)
        return
    for folder in glob.glob(f"{before}/"):
        real = os.path.realpath(folder)
        if real not in real_above:
            os.scandir(folder).close()  # Raises where glob would silently skip the folder.
            below = after.removesuffix("/")
            yield from _matches(glob.escape(folder) + below) if below else [folder]
            yield from _matches(f"{glob.escape(folder)}*/**/{below}".removesuffix("/"), (*real_above, real))


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1:,} more" if names[1:] else "")
