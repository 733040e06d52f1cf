"""Entries of a configuration (files, globs, folders) → the list of corpus files, in a fixed order.

Each entry is one *source*. Its files are sorted by path, so the same entries give the same corpus on every machine.
Formats by name: ``.jsonl``, ``.json``, ``.ndjson`` (one JSON object a line) and ``.txt``, each plain or ``.gz``.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import Fault, UserError

Kind = Literal["jsonl", "txt"]
KIND_OF_SUFFIX: dict[str, Kind] = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".txt": "txt"}
EMBEDDED_CORPUS = Path("data/embedded/corpus.jsonl")
"""What the shipped configuration names; `run_all.sh` makes it."""
FORMATS = ".jsonl, .json (one JSON object a line) or .txt, each plain or .gz"
OWN_OUTPUT_ENDINGS = ("_quarantine.jsonl", "manifest.json", PARTIAL_SUFFIX)
"""Files that our own steps write; a folder or a glob that holds them is still only the corpus."""


@dataclass(frozen=True)
class InputFile:
    """One file of the corpus, as it was found."""

    path: Path
    source: int
    """Which entry of the configuration it came from, counted from 0."""
    kind: Kind
    gzipped: bool
    bytes: int
    """Size on disk (compressed if gzipped)."""
    modified_ns: int


def find_files(entries: Sequence[str], where: str) -> list[InputFile]:
    """Find the files of every entry, in corpus order; `where` names the place of the entries for error messages.

    Raises:
        UserError: an entry that names nothing, an unknown format, a file named twice, a corpus without a byte.
    """
    faults: list[Fault] = []
    files: list[InputFile] = []
    first_entry: dict[Path, str] = {}
    for source, entry in enumerate(entries):
        for path in _expand(entry, where, faults):
            resolved = path.resolve()
            if resolved in first_entry:
                # The same documents twice would put one document into both training and validation.
                rule = f"names {path}, which {first_entry[resolved]} names already"
                faults.append(Fault(where=where, found=entry, rule=rule, remedy="name each file once"))
                continue
            first_entry[resolved] = entry
            status = path.stat()
            kind, gzipped = _format_of(path) or ("txt", False)
            files.append(InputFile(path, source, kind, gzipped, status.st_size, status.st_mtime_ns))
    if not faults and not any(file.bytes for file in files):
        faults.append(Fault(where=where, rule=f"the corpus is empty: {len(files)} files, 0 bytes"))
    if faults:
        raise UserError(faults)
    return files


def _expand(entry: str, where: str, faults: list[Fault]) -> list[Path]:
    path = Path(entry).expanduser()
    if path.is_file():
        if _format_of(path) is None:
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


def _corpus_files(paths: Iterable[Path]) -> list[Path]:
    return sorted({path for path in paths if _is_corpus_file(path)})


def _is_corpus_file(path: Path) -> bool:
    own = path.name.startswith(".") or path.name.endswith(OWN_OUTPUT_ENDINGS)
    return not own and _format_of(path) is not None and path.is_file()


def _format_of(path: Path) -> tuple[Kind, bool] | None:
    name = path.name.lower()
    gzipped = name.endswith(".gz")
    kind = KIND_OF_SUFFIX.get(Path(name.removesuffix(".gz")).suffix)
    return (kind, gzipped) if kind else None


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
