"""Entries of a configuration (files, globs, folders, lists, Hub datasets) → the list of corpus files, in a fixed order.

Each entry is one *source*. Its files are sorted by path, so the same entries give the same corpus on every machine;
the files of a list (``@files.txt``) stand in the order of the list. Links are followed (see `search`). Formats by
name: ``.jsonl``, ``.json``, ``.ndjson`` (one JSON object a line) and ``.txt``, each plain, ``.gz`` or ``.zst``;
``.parquet``.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, Literal

from zerokara import manifest
from zerokara.corpus.packed import Packing
from zerokara.corpus.search import FileSearch
from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import Fault, RunError, UserError, shown
from zerokara.progress import log

if TYPE_CHECKING:
    from zerokara.corpus.hub import HubFile

FileFormat = Literal["jsonl", "txt", "tsv", "parquet"]
FORMAT_OF_SUFFIX: dict[str, FileFormat] = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".txt": "txt"}
PACKING_OF_SUFFIX: dict[str, Packing] = {".gz": "gzip", ".zst": "zstd"}
OTHER_PACKINGS = frozenset({".bz2", ".xz", ".lzma", ".lz4", ".br", ".snappy", ".zip", ".7z", ".zstd", ".gzip"})
"""Text packed like this is not read, but a note names it."""
EMBEDDED_CORPUS = Path("data/embedded/corpus.jsonl")
"""What the shipped configuration names; `run_all.sh` makes it."""
OWN_OUTPUT_ENDINGS = ("_quarantine.jsonl", "manifest.json", PARTIAL_SUFFIX)
"""Files that our own steps write; a folder or a glob that holds them is still only the corpus."""
LIST_MARK, HUB_MARK = "@", "hf://"
MAX_LISTED = 5
"""At most so many of the files with the same fault are named."""


@dataclass(frozen=True)
class Formats:
    """The formats of files that an entry may name."""

    of_suffix: Mapping[str, FileFormat]
    text: str
    """The same in words, for messages."""

    def of(self, name: str) -> tuple[FileFormat, Packing] | None:
        """The format that a file's name tells, or None."""
        suffixes = [suffix.lower() for suffix in Path(name).suffixes] or [""]
        if suffixes[-1] == ".parquet":
            return "parquet", "none"
        packing = PACKING_OF_SUFFIX.get(suffixes[-1], "none")
        inner = suffixes[:-1] if packing != "none" else suffixes
        file_format = self.of_suffix.get(inner[-1]) if inner else None
        return (file_format, packing) if file_format else None

    def is_name(self, name: str) -> bool:
        """Whether a file of this name, found in a folder or by a pattern, belongs to the text."""
        return not name.startswith(".") and not name.endswith(OWN_OUTPUT_ENDINGS) and self.of(name) is not None

    def is_packed_otherwise(self, name: str) -> bool:
        """Whether a name is that of such a file with one suffix more, as ``.xz``."""
        inner, suffix = os.path.splitext(name)
        return suffix.lower() in OTHER_PACKINGS and self.is_name(inner)


CORPUS = Formats(
    FORMAT_OF_SUFFIX, ".jsonl, .json (one JSON object a line) or .txt, each plain, .gz or .zst, or .parquet"
)
"""Text to pretrain on."""
TABLES = Formats(
    {**FORMAT_OF_SUFFIX, ".txt": "tsv", ".tsv": "tsv"},
    ".jsonl, .json (one JSON object a line), .tsv or .txt (columns between tabs, their names in the first line), each "
    "plain, .gz or .zst, or .parquet",
)
"""Records with several fields."""


@dataclass(frozen=True)
class InputFile:
    """One file of the corpus, as the search found it."""

    path: Path
    """In messages use `name`, which is right for a file on the Hub too."""
    source: int
    """The entry of the configuration that it belongs to, counted from 0."""
    format: FileFormat
    packing: Packing
    bytes: int
    """Size on disk (packed)."""
    modified_ns: int
    """0 for a file on the Hub."""
    remote: HubFile | None = None
    """Where the file is on the Hub; None for one on a disk."""

    @property
    def name(self) -> str:
        """The file's name in messages and in JSON files."""
        return shown(self.path if self.remote is None else self.remote.name)

    @property
    def is_packed(self) -> bool:
        """Whether lines must be unpacked to be read (a .parquet packs its pages itself)."""
        return self.packing != "none"

    def open(self, buffer_bytes: int) -> BinaryIO:
        """The bytes on disk or on the Hub, as a seekable stream that reads about `buffer_bytes` at once.

        Raises:
            OSError: it is gone or cannot be reached; so does reading.
        """
        if self.remote is None:
            return open(self.path, "rb", buffering=buffer_bytes)
        return _hub().open_file(self.remote, buffer_bytes)

    def changed(self) -> str:
        """How the file changed since it was found, or empty; what is on the Hub is pinned to a commit.

        Raises:
            OSError: it is gone.
        """
        if self.remote is not None:
            return ""
        status = self.path.stat()
        if (status.st_size, status.st_mtime_ns) == (self.bytes, self.modified_ns):
            return ""
        return f"it had {self.bytes:,} bytes, now {status.st_size:,}"


def _hub() -> ModuleType:
    """The reader of Hub datasets: importing huggingface_hub takes a while, so only where an entry names one."""
    from zerokara.corpus import hub

    return hub


def find_files(entries: Sequence[str], where: str, formats: Formats = CORPUS) -> list[InputFile]:
    """Find the files of every entry, in corpus order; `where` is the place of the entries in the configuration.

    Raises:
        UserError: an entry that names nothing, an unknown format, a file named twice, a corpus without a byte, a Hub
            that cannot be reached.
    """
    faults: list[Fault] = []
    files: list[InputFile] = []
    first_entry: dict[str, str] = {}
    for source, entry in enumerate(entries):
        for line, place, found in _expand(entry, where, formats, faults):
            # The same documents twice would put one document into both training and validation.
            again = [same for same in found if same in first_entry]
            if again:
                more = f" and {len(again) - 1:,} more files" if again[1:] else ""
                rule = f"names {_name(found[again[0]])}{more}, which {shown(first_entry[again[0]])} names already"
                faults.append(Fault(where=place, value=shown(line), rule=rule, remedy="name each file once"))
            for same, file in found.items():
                first_entry.setdefault(same, line)
                files.append(_input_file(file, source, formats))
    unreadable = [file for file in files if file.remote is None and not os.access(file.path, os.R_OK)]
    if unreadable:
        more = f"; nor can {len(unreadable) - 1:,} more files" if unreadable[1:] else ""
        faults.append(Fault(where=unreadable[0].name, rule=f"you may not read this file{more}"))
    if not faults and not any(file.bytes for file in files):
        faults.append(Fault(where=where, rule=f"the corpus is empty: {len(files)} files, 0 bytes"))
    if faults:
        raise UserError(faults)
    return files


def check_unchanged(files: Sequence[InputFile]) -> None:
    """Check, once the files are read, that none has changed since they were found.

    Raises:
        RunError: one is not.
        OSError: one is gone.
    """
    for file in files:
        if changed := file.changed():
            raise RunError(
                f"{file.name} changed while it was read ({changed}); nothing was written; run again when it is complete"
            )


def for_manifest(files: Sequence[InputFile]) -> list[Path | manifest.RemoteFile]:
    """The files as inputs of a `manifest.StepSpec`."""
    return [
        file.path if file.remote is None else manifest.RemoteFile(file.name, file.bytes, file.remote.content)
        for file in files
    ]


def _name(found: Path | HubFile) -> str:
    return shown(found if isinstance(found, Path) else found.name)


def _input_file(found: Path | HubFile, source: int, formats: Formats) -> InputFile:
    file_format, packing = formats.of(found.name) or ("txt", "none")
    if isinstance(found, Path):
        status = found.stat()
        return InputFile(found, source, file_format, packing, status.st_size, status.st_mtime_ns)
    return InputFile(Path(found.name), source, file_format, packing, found.bytes, 0, found)


_Found = Mapping[str, "Path | HubFile"]
"""What tells a file from all others, whatever its names, → the file."""


def _expand(entry: str, where: str, formats: Formats, faults: list[Fault]) -> Iterator[tuple[str, str, _Found]]:
    """The files of an entry, of a list line by line: each with its place."""
    if entry.startswith(LIST_MARK) and not Path(entry).exists():
        for line, place in _listed(_path(entry.removeprefix(LIST_MARK)), entry, where, faults):
            yield line, place, _files_of(line, place, formats, faults)
    else:
        yield entry, where, _files_of(entry, where, formats, faults)


def _files_of(entry: str, where: str, formats: Formats, faults: list[Fault]) -> _Found:
    if entry.startswith(HUB_MARK):
        files = _hub().find(entry, where, faults, lambda name: formats.of(name) is not None, formats.text)
        return {file.name: file for file in files}
    if not entry.strip():
        faults.append(Fault(where=where, rule="an entry is empty", remedy="name a file, a folder or a pattern"))
        return {}
    path = _path(entry)
    if path.is_file():
        if formats.of(path.name) is None:
            faults.append(Fault(where=where, value=shown(entry), rule=f"is of no format known here: {formats.text}"))
            return {}
        return {os.path.realpath(path): path}
    search = FileSearch(formats.is_name, formats.is_packed_otherwise)
    if path.is_dir():
        search.below(path)
        looked_for = f"files ending in {formats.text}, in the folder and below"
    elif glob.has_magic(entry):
        search.matching(str(path))
        looked_for = f"the pattern {shown(path.absolute())}, for {formats.text}"
    else:
        looked_for = f"{shown(path.absolute())} as a file or a folder"
        if path.exists():
            rule = "is a pipe, a socket or a device; a corpus is read more than once"
            faults.append(Fault(where=where, value=shown(entry), rule=rule, remedy="write it into a file"))
            return {}
        if path.is_symlink():
            search.dangling.append(path)
    lost = _lost(search, formats, where)
    faults.extend(lost)
    _log_left_out(search, entry)
    found = dict(sorted(search.found.items(), key=lambda file: file[1]))
    if not found and not lost:
        rule = f"names no corpus file; looked for {looked_for}"
        faults.append(Fault(where=where, value=shown(entry), rule=rule, remedy=_beside(path)))
    return found


def _lost(search: FileSearch, formats: Formats, where: str) -> list[Fault]:
    """Faults for text that the user would miss."""
    reasons = [(link, "is a link to nothing") for link in search.dangling if formats.is_name(link.name)]
    reasons += [(path, f"cannot be looked into: {why}") for path, why in search.unreadable]
    return [
        Fault(where=where, value=shown(path), rule=rule, remedy="repair it, or remove it")
        for path, rule in sorted(reasons)[:MAX_LISTED]
    ]


def _log_left_out(search: FileSearch, entry: str) -> None:
    """Name what a user may have meant to include."""
    if search.num_repeats:
        log(f"note: {shown(entry)}: {search.num_repeats:,} links lead to files that are included already; left out")
    for path in sorted(search.not_files.values())[:MAX_LISTED]:
        log(f"note: {shown(path)} is a pipe, a socket or a device, and is left out")
    if search.suspects:
        more = f" and {len(search.suspects) - 1:,} more" if search.suspects[1:] else ""
        what = "of a format not known here, and left out; pack it as .gz or .zst"
        log(f"note: {shown(min(search.suspects))}{more}: {what}")
    folders = [link for link in sorted(search.dangling) if not link.suffix and not link.name.startswith(".")]
    for link in folders[:MAX_LISTED]:
        log(f"note: {shown(link)} is a link to nothing; if it was a folder of the corpus, its text will be missing")


def _listed(path: Path, entry: str, where: str, faults: list[Fault]) -> Iterator[tuple[str, str]]:
    """The entries of a list with their places: one a line, relative to its folder, with ``#`` before comments."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        rule = f"the list {shown(path.absolute())} cannot be read: {reason}"
        faults.append(
            Fault(where=where, value=shown(entry), rule=rule, remedy=_beside(path) if not path.exists() else "")
        )
        return
    named = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    named = [(number, line) for number, line in named if line and not line.startswith("#")]
    if not named:
        rule = f"the list {shown(path.absolute())} names no file"
        faults.append(Fault(where=where, value=shown(entry), rule=rule, remedy="write one file, glob or folder a line"))
    for number, line in named:
        place = f"{shown(path)}:{number}"
        if line.startswith(LIST_MARK):
            faults.append(Fault(where=place, value=line, rule="a list cannot name another list"))
            continue
        yield line if line.startswith(HUB_MARK) else str(path.parent / _path(line)), place


def _path(entry: str) -> Path:
    return Path(os.path.expanduser(entry))  # that of Path raises where there is no such user


def _beside(path: Path) -> str:
    """What lies beside a path, as a hint for a mistyped name."""
    if path == EMBEDDED_CORPUS:
        return f"make it with: .venv/bin/python -m zerokara.corpus.embedded {path}"
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f"there is no folder {shown(folder.absolute())}"
    names = sorted(shown(item.name) for item in folder.iterdir())
    if not names:
        return f"{shown(folder.absolute())} is empty"
    return f"{shown(folder.absolute())} holds {', '.join(names[:8])}" + (
        f" and {len(names) - 8} more" if names[8:] else ""
    )
