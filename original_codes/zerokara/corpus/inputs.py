"""Entries of a configuration (files, globs, folders, lists, Hub datasets) → the list of corpus files, in a fixed order.

Each entry is one *source*. Its files are sorted by path, so the same entries give the same corpus on every machine;
the files of a list (``@files.txt``) stand in the order of the list. Formats by name: ``.jsonl``, ``.json``,
``.ndjson`` (one JSON object a line) and ``.txt``, each plain, ``.gz`` or ``.zst``; ``.parquet``.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from zerokara import manifest
from zerokara.corpus import hub
from zerokara.corpus.packed import Packing
from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import Fault, UserError

Kind = Literal["jsonl", "txt", "parquet"]
KIND_OF_SUFFIX: dict[str, Kind] = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".txt": "txt"}
PACKING_OF_SUFFIX: dict[str, Packing] = {".gz": "gzip", ".zst": "zstd"}
EMBEDDED_CORPUS = Path("data/embedded/corpus.jsonl")
"""What the shipped configuration names; `run_all.sh` makes it."""
FORMATS = ".jsonl, .json (one JSON object a line) or .txt, each plain, .gz or .zst, or .parquet"
OWN_OUTPUT_ENDINGS = ("_quarantine.jsonl", "manifest.json", PARTIAL_SUFFIX)
"""Files that our own steps write; a folder or a glob that holds them is still only the corpus."""
LIST_MARK = "@"


@dataclass(frozen=True)
class InputFile:
    """One file of the corpus, as it was found."""

    path: Path
    """For messages take `name`, which is also right for a file on the Hub."""
    source: int
    """Which entry of the configuration it came from, counted from 0."""
    kind: Kind
    packing: Packing
    bytes: int
    """Size on disk (packed)."""
    modified_ns: int
    """0 for a file on the Hub."""
    remote: hub.HubFile | None = None
    """Where the file is on the Hub; None for one on a disk."""

    @property
    def name(self) -> str:
        """The file as it is named to people."""
        return str(self.path) if self.remote is None else self.remote.name

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
        return hub.open_file(self.remote, buffer_bytes)

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


def find_files(entries: Sequence[str], where: str) -> list[InputFile]:
    """Find the files of every entry, in corpus order; `where` names the place of the entries for error messages.

    Raises:
        UserError: an entry that names nothing, an unknown format, a file named twice, a corpus without a byte, a Hub
            that cannot be reached.
    """
    faults: list[Fault] = []
    files: list[InputFile] = []
    first_entry: dict[str, str] = {}
    for source, entry in enumerate(entries):
        for found in _expand(entry, where, faults):
            same = found.name if isinstance(found, hub.HubFile) else str(found.resolve())
            if not same.isascii() and re.search("[\ud800-\udfff]", same):  # no manifest and no log could hold it
                faults.append(Fault(where, f"names {found}, which is no UTF-8", found=entry, remedy="rename that file"))
                continue
            if same in first_entry:
                # The same documents twice would put one document into both training and validation.
                rule = f"names {found}, which {first_entry[same]} names already"
                faults.append(Fault(where=where, found=entry, rule=rule, remedy="name each file once"))
                continue
            first_entry[same] = entry
            files.append(_input_file(found, source))
    if not faults and not any(file.bytes for file in files):
        faults.append(Fault(where=where, rule=f"the corpus is empty: {len(files)} files, 0 bytes"))
    if faults:
        raise UserError(faults)
    return files


def for_manifest(files: Sequence[InputFile]) -> list[Path | manifest.RemoteFile]:
    """The files as inputs of a `manifest.Work`."""
    return [
        file.path if file.remote is None else manifest.RemoteFile(file.name, file.bytes, file.remote.content)
        for file in files
    ]


def format_of(name: str) -> tuple[Kind, Packing] | None:
    """The format that a file's name tells, or None."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes] or [""]
    if suffixes[-1] == ".parquet":
        return "parquet", "none"
    packing = PACKING_OF_SUFFIX.get(suffixes[-1], "none")
    inner = suffixes[:-1] if packing != "none" else suffixes
    kind = KIND_OF_SUFFIX.get(inner[-1]) if inner else None
    return (kind, packing) if kind else None


def _input_file(found: Path | hub.HubFile, source: int) -> InputFile:
    kind, packing = format_of(found.name) or ("txt", "none")
    if isinstance(found, hub.HubFile):
        return InputFile(Path(found.name), source, kind, packing, found.bytes, 0, found)
    status = found.stat()
    return InputFile(found, source, kind, packing, status.st_size, status.st_mtime_ns)


def _expand(entry: str, where: str, faults: list[Fault]) -> Sequence[Path | hub.HubFile]:
    if entry.startswith(hub.PREFIX):
        return hub.find(entry, where, faults, lambda name: format_of(name) is not None, FORMATS)
    if entry.startswith(LIST_MARK) and not Path(entry).exists():
        return _listed(Path(entry.removeprefix(LIST_MARK)).expanduser(), entry, where, faults)
    path = Path(entry).expanduser()
    if path.is_file():
        if format_of(path.name) is None:
            faults.append(Fault(where=where, found=entry, rule=f"is of no format known here: {FORMATS}"))
            return []
        return [path]
    if path.is_dir():
        found, looked_for = _corpus_files(path.rglob("*")), f"files ending in {FORMATS}, in the folder and below"
    elif glob.has_magic(entry):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        inside = (file for match in matches if match.is_dir() for file in match.rglob("*"))
        found, looked_for = _corpus_files([*matches, *inside]), f"the pattern {path.absolute()}, for {FORMATS}"
    else:
        found, looked_for = [], f"{path.absolute()} as a file or a folder"
    if not found:
        rule = f"names no corpus file; looked for {looked_for}"
        faults.append(Fault(where=where, found=entry, rule=rule, remedy=_beside(path)))
    return found


def _listed(path: Path, entry: str, where: str, faults: list[Fault]) -> list[Path | hub.HubFile]:
    """The files of a list: an entry a line, relative to the folder of the list, with ``#`` before comments."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        rule = f"the list {path.absolute()} cannot be read: {reason}"
        faults.append(Fault(where=where, found=entry, rule=rule, remedy=_beside(path) if not path.exists() else ""))
        return []
    found: list[Path | hub.HubFile] = []
    named = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    named = [(number, line) for number, line in named if line and not line.startswith("#")]
    if not named:
        rule = f"the list {path.absolute()} names no file"
        faults.append(Fault(where=where, found=entry, rule=rule, remedy="write one file, glob or folder a line"))
    for number, line in named:
        place = f"{path}:{number}"
        if line.startswith(LIST_MARK):
            faults.append(Fault(where=place, found=line, rule="a list cannot name another list"))
            continue
        one = line if line.startswith(hub.PREFIX) else str(path.parent / Path(line).expanduser())
        found.extend(_expand(one, place, faults))
    return found


def _corpus_files(paths: Iterable[Path]) -> list[Path]:
    return sorted({path for path in paths if _is_corpus_file(path)})


def _is_corpus_file(path: Path) -> bool:
    own = path.name.startswith(".") or path.name.endswith(OWN_OUTPUT_ENDINGS)
    return not own and format_of(path.name) is not None and path.is_file()


def _beside(path: Path) -> str:
    """What does lie there, as a hint for a mistyped name."""
    if path == EMBEDDED_CORPUS:
        return f"make it with: .venv/bin/python -m zerokara.corpus.embedded {path}"
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f"there is no folder {folder.absolute()}"
    names = sorted(item.name for item in folder.iterdir())
    if not names:
        return f"{folder.absolute()} is empty"
    return f"{folder.absolute()} holds {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if names[8:] else "")
