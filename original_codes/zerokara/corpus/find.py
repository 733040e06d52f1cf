"""Entries of a configuration (files, globs, folders, lists, addresses) → the corpus files, in a fixed order.

Each entry is one *source*. Its files are sorted by path, so the same entries give the same corpus on every machine;
the files of a list (``@files.txt``) stand in its order. Links are followed, each folder and each file once: a file has
its real name if that is among those found, else the first, by path, that a link gives it. Notes name what is left out.

Files that a folder or a pattern leads to, on disk or at an address, are left out if they are hidden, internal to a
program, about the corpus, or of another format. A file that an entry itself names is always taken.
"""

from __future__ import annotations

import errno
import glob
import heapq
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from zerokara.base.durable import PARTIAL_SUFFIX
from zerokara.base.errors import Fault, RunError, UserError, holding, nearest, refuse, shown
from zerokara.base.progress import first_of, log
from zerokara.corpus.compressed import Compression

if TYPE_CHECKING:  # pydantic, which the reading of a file needs not
    from zerokara.base import manifest

FileFormat = Literal["jsonl", "txt", "tsv", "parquet"]
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
_AT_WORK = re.compile(rf"[._~$].+|.*{re.escape(PARTIAL_SUFFIX)}|lost\+found|node_modules|site-packages|venv|dropped")
"""Names of hidden folders and files, and of programs at work: ``_temporary`` and ``_SUCCESS`` of Spark, our own; and of
what step 0 drops."""
_ABOUT = re.compile(
    r"(?i).*(manifest\.json|_quarantine\.jsonl)|(dataset[_-](infos?|dict|metadata)|state|croissant|metadata|datapackage|"
    r"\w*config|report|package|tokenizer|special_tokens_map|vocab|width\d+_tokens\d+_validation\d+)\.json|((readme|licen[cs]es?|requirements|copying)([-_.].*)?|"
    r"notice|authors|contributors|change(s|log)|citation|checksums?|(md5|sha\d+)(sums?)?|merges|vocab)\.txt"
)
"""Names of files about a dataset, a model or a program, and of those that our steps write."""
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://")
_REPEATED = "another name of what is included already"


class LeftOut(defaultdict[str, set[str]]):
    """Names of what does not belong to the corpus, by the reason; `outputs` are real paths of what the step writes."""

    outputs: Set[str] = frozenset()


@dataclass(frozen=True)
class Formats:
    """File formats that an entry may name; `text` describes them in messages."""

    of_suffix: Mapping[str, FileFormat]
    text: str

    def of(self, name: str) -> tuple[FileFormat, Compression] | None:
        inner, suffix = os.path.splitext(name.lower())
        if suffix == ".parquet":
            return "parquet", "none"
        compression = _COMPRESSIONS.get(suffix, "none")
        file_format = self.of_suffix.get(suffix if compression == "none" else os.path.splitext(inner)[1])
        return (file_format, compression) if file_format else None


_TEST = re.compile(r"(^|[^a-z])(tests?|testset|val|valid|validation|dev|eval|held-?out|holdout)([^a-z]|$)")
"""Names of files and folders that datasets do not train on."""
CORPUS = Formats(
    {**dict.fromkeys((".jsonl", ".jsonlines", ".jl", ".ndjson", ".json"), "jsonl"), ".txt": "txt"},
    ".jsonl, .jsonlines, .jl, .ndjson or .json (one JSON object a line) or .txt, each plain, .gz or .zst, or .parquet",
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
    def version(self) -> int | str:
        """What differs where the content does: the time of change in ns, or a content id."""
        return self.remote.sha256 if self.remote else self.modified_ns

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


class FoundFiles(list[InputFile]):
    """Files in corpus order, and the names of what else the folders of the entries hold, by the reason."""

    left_out: dict[str, list[str]]


def find_files(
    entries: Sequence[str], where: str | Sequence[str], formats: Formats = CORPUS, outputs: Iterable[Path] = ()
) -> FoundFiles:
    """Find the files of every entry, in corpus order; `where` is the place of all in the configuration, or of each.
    The files and folders `outputs`, which the step writes, are no corpus where an entry leads to them.

    Raises UserError for an entry without a file, an unknown format, a file named twice, and a corpus without a byte.
    """
    faults, files, first_entry, left_out = list[Fault](), FoundFiles(), dict[str, str](), LeftOut(set)
    left_out.outputs = {*map(os.path.realpath, outputs)}
    places = [where] * (len(entries) or 1) if isinstance(where, str) else where
    for source, entry in enumerate(entries):
        for line, place in _lines_of(entry, places[source], faults):
            try:
                found = _files_of(line, place, source, formats, left_out)
            except UserError as error:
                faults += error.faults
                continue
            # The same documents twice would put one document into both training and validation.
            if again := [real for real in found if real in first_entry]:
                names = first_of([found[real].name for real in again])
                rule = f"names {names}, which {shown(first_entry[again[0]])} names already"
                faults.append(Fault(where=place, value=shown(line), rule=rule, remedy="name each file once"))
            first_entry = dict.fromkeys(found, line) | first_entry
            files.extend(found.values())
    files.left_out = {reason: sorted(map(shown, others)) for reason, others in left_out.items()}
    for reason, others in files.left_out.items():
        log(f"note: {first_of(others, 20)}: left out, {reason}")  # the manifest names all
    if closed := [file.name for file in files if file.remote is None and not os.access(file.path, os.R_OK)]:
        faults.append(Fault(first_of(closed), "cannot be read: permission denied"))
    if not faults and not any(file.bytes for file in files):
        faults.append(Fault(places[0], f"there is nothing in {first_of([file.name for file in files])}: 0 bytes"))
    refuse(faults)
    return files


def note_tests(files: Sequence[InputFile]) -> None:
    """Log which files have names of test data, where other files have names of training data."""
    names = {file.name: "/".join(file.name.split("/")[-2:]).lower() for file in files}
    others = [name for name, end in names.items() if "train" not in end and _TEST.search(end)]
    if others and any("train" in end for end in names.values()):
        log(f"note: {first_of(others)}: read as well; if they are test data, name the training files alone")


def check_unchanged(files: Sequence[InputFile]) -> None:
    """Raise RunError or OSError if a file on a disk has changed since it was found; `remote` checks the others."""
    for file in (file for file in files if file.remote is None):
        status = file.path.stat()
        if (status.st_size, status.st_mtime_ns) != (file.bytes, file.modified_ns):
            changed = f"{file.name} changed while it was read (it had {file.bytes:,} bytes, now {status.st_size:,})"
            raise RunError(f"{changed}; run the same command again when it is complete")


def dataset_of(entry: str) -> str | None:
    """Return owner/name of the data set on the Hub that an entry is in, if any."""
    found = re.match("hf://datasets/([^/@]+/[^/@]+)", entry)
    return found and found[1]


def public_name(entry: str) -> str:
    """Name of an entry for readers elsewhere, without folders of this machine."""
    return dataset_of(entry) or Path(entry).name


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
        lines = enumerate(map(str.strip, path.read_text(encoding="utf-8-sig").split("\n")), 1)
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


def _files_of(entry: str, where: str, source: int, formats: Formats, left_out: LeftOut) -> dict[str, InputFile]:
    """Files of an entry by what tells them apart: their addresses, or their real paths."""
    files, path = dict[str, InputFile](), Path(os.path.expanduser(entry))
    rule = f"names no file of a format known here: {formats.text}"
    if _ADDRESS.match(entry):
        from zerokara.corpus import remote  # takes a while, so only where an entry is an address

        found = {file: file.path.rpartition("/")[2] for file in remote.find(entry, where)}
        is_one_file = [*found.values()] == [entry.rpartition("/")[2]]
        for file, name in found.items():
            if (is_one_file or _is_corpus(file.path, entry, formats, left_out)) and (kind := formats.of(name)):
                files[file.path] = InputFile(Path(file.path), source, *kind, file.bytes, 0, file)
        remedy = f"it {holding(found.values())}{remote.CONVERSION if entry.startswith(remote.HUB) else ''}"
    elif not entry.strip():
        raise UserError(Fault(where, "an entry is empty", remedy="name a file, a folder or a pattern"))
    elif path.exists() and not path.is_dir() and not path.is_file():
        rule = "is a pipe, a socket or a device; a corpus is read more than once"
        raise UserError(Fault(where, rule, value=shown(entry), remedy="write it into a file"))
    else:
        for each, key in sorted((each, key) for key, each in _search(path, formats, where, left_out).items()):
            if kind := formats.of(each.name):
                status = each.stat()
                files[key] = InputFile(each, source, *kind, status.st_size, status.st_mtime_ns)
        remedy = "" if files else nearest(path)
        if not os.path.lexists(path) and not (glob.has_magic(entry) and path.parent.is_dir()):
            rule = "there is no such file or folder"
        if path == Path("data/embedded/corpus.jsonl"):  # of the shipped configuration
            remedy = f"make it with: .venv/bin/python -m zerokara.corpus.embedded {path}"
    if not files:
        raise UserError(Fault(where, rule, value=shown(entry), remedy=remedy))
    return files


def _is_corpus(path: str, entry: str, formats: Formats | None, left_out: LeftOut) -> bool:
    """True if a file that an entry leads to, or without `formats` a folder, belongs to the corpus; else note it."""
    if left_out.outputs and path != entry and os.path.realpath(path) in left_out.outputs:
        left_out["written by this step"].add(path)
        return False
    parts, names = path.split("/"), entry.split("/")
    for number, part in enumerate(parts, 1):
        if _AT_WORK.fullmatch(part) and not any(each[:1] == part[0] and fnmatchcase(part, each) for each in names):
            left_out["hidden, dropped by step 0, or of a program at work"].add("/".join(parts[:number]))
            return False
    if formats and _ABOUT.fullmatch(parts[-1]):
        left_out["about a dataset or a program, or written by a step"].add(path)
    elif formats and not formats.of(parts[-1]):
        left_out[f"of none of the formats {formats.text}"].add(path)
    else:
        return True
    return False


def _search(given: Path, formats: Formats, where: str, left_out: LeftOut) -> dict[str, Path]:
    """Wanted files of a folder or a pattern and of all folders below, links last, by what tells them apart."""
    found, folders, faults = dict[str, Path](), dict[str, Path](), dict[Path, str]()
    # `glob` follows a circle of links until the path is too long: what stands below any `**` is walked, and compared.
    plain = next((folder for folder in given.parents if folder.is_dir()), Path())  # whatever brackets are in its name
    pattern = Path(glob.escape(str(plain)), given.relative_to(plain))
    above, stars, below = os.path.join(".", pattern, "").partition("/**/")
    if "**" in below:
        remedy = "write it once, and * elsewhere"
        raise UserError(Fault(where, "has ** more than once", value=shown(given), remedy=remedy))

    def matches(path: Path) -> bool:
        names = [path.relative_to(top) for top in tops if path.is_relative_to(top)]
        return not below or any(each.match(below[:-1]) for name in names for each in (name, *name.parents))

    def take_file(path: Path, real: str) -> None:
        if not matches(path) or (path != given and not _is_corpus(str(path), str(given), formats, left_out)):
            return
        status = os.stat(path)
        key = real if status.st_nlink == 1 else f"{status.st_dev}:{status.st_ino}"  # of hard links
        if not stat.S_ISREG(status.st_mode):
            left_out["a pipe, a socket or a device"].add(str(path))
        elif found.setdefault(key, path) != path:
            left_out[_REPEATED].add(str(path))

    found_by = f"{above}/" if stars else str(pattern)
    tops = [given] if os.path.lexists(given) else sorted({*map(Path, glob.glob(found_by))})
    waiting = sorted(_turn(str(top)) for top in tops)  # a heap
    while waiting:
        is_link, _, path, real = heapq.heappop(waiting)
        try:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                take_file(path, real)
            elif _is_corpus(str(path), str(given), None, left_out) and folders.setdefault(real, path) == path:
                with os.scandir(path) as entries:
                    for entry in sorted(entries, key=lambda each: each.name):  # so that of hard links the first stays
                        if entry.is_symlink() or entry.is_dir():
                            heapq.heappush(waiting, _turn(entry.path))
                        else:
                            take_file(Path(entry.path), os.path.join(real, entry.name))
            elif is_link and folders.get(real, path) != path:
                left_out[_REPEATED].add(str(path))
        except OSError as error:
            if not is_link or error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                faults[path] = f"cannot be looked into: {error.strerror or error}"
            elif not matches(path):
                continue
            elif formats.of(path.name) and _is_corpus(str(path), str(given), formats, left_out):
                faults[path] = "is a link to nothing"
            else:
                left_out["a link to nothing; if it was a folder of the corpus, its text is missing"].add(str(path))
    if faults:
        first = sorted(faults.items())[:5]
        raise UserError(Fault(where, rule, value=shown(one), remedy="repair it, or remove it") for one, rule in first)
    return found


def _turn(path: str) -> tuple[bool, bool, Path, str]:
    """Sorts what stands in its own place first, then what a linked folder leads to, then links."""
    real = os.path.realpath(path)
    return os.path.islink(path), real != os.path.abspath(path), Path(path), real
