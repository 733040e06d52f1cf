"""The content of the corpus files of one run of step 2: hashed beside the work, and remembered in the work folder.

``hashes.jsonl`` gets a line for each file as soon as it is hashed. So a run that was interrupted is continued where the
files have been copied, or where another machine gives them other times of change: by content. Files whose place, size
and time of change are the same are not read for this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from zerokara import hashing
from zerokara.corpus.find import InputFile
from zerokara.errors import shown
from zerokara.hashing import FileKey

NAME = "hashes.jsonl"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A corpus file in the plan of a run."""

    path: str
    """Absolute, or its address on the Hub."""
    bytes: int
    modified_ns: int
    source: int

    @classmethod
    def of(cls, file: InputFile) -> FileRecord:
        """As the search found it."""
        path = file.remote.name if file.remote else shown(file.path.resolve())
        return cls(path, file.bytes, file.modified_ns, file.source)

    @property
    def key(self) -> FileKey:
        """By which its hash is known."""
        return FileKey(self.path, self.bytes, self.modified_ns)


def recorded(folder: Path) -> dict[FileKey, str]:
    """What was hashed before in this work folder; a line that was cut off is left out."""
    found = {}
    with suppress(FileNotFoundError):
        for line in (folder / NAME).read_bytes().splitlines():
            with suppress(ValueError, TypeError):
                path, size, modified, sha256 = orjson.loads(line)
                found[FileKey(path, size, modified)] = str(sha256)
    return found


def hashed_beside_the_work(
    folder: Path, files: Sequence[InputFile], num_threads: int | None = None
) -> hashing.BackgroundHashes:
    """Start to hash the corpus files, but for those that the folder knows; note each there.

    `num_threads`: as `hashing.BackgroundHashes` has it.
    """

    def note(key: FileKey, sha256: str) -> None:
        with suppress(OSError), open(folder / NAME, "ab") as file:  # without it a changed time costs the shards
            file.write(orjson.dumps([*key, sha256]) + b"\n")

    local = [file.path for file in files if file.remote is None]
    return hashing.BackgroundHashes(local, num_threads, known=recorded(folder), on_hash=note)


def is_same(was: Sequence[FileRecord], files: Sequence[InputFile], known: Mapping[FileKey, str]) -> bool:
    """Whether these files hold what those of an earlier plan held, of which the hashes in `known` are known.

    Where only the place or the time of change differs, files are read, which shows progress if it takes long.

    Raises:
        OSError: a file cannot be read.
    """
    now = [FileRecord.of(file) for file in files]
    if [(record.bytes, record.source) for record in was] != [(record.bytes, record.source) for record in now]:
        return False
    differing = [number for number, (old, new) in enumerate(zip(was, now, strict=True)) if old.key != new.key]
    if any(was[number].key not in known or files[number].remote is not None for number in differing):
        return False
    hashes = hashing.hash_files([files[number].path for number in differing])
    return all(hashes[now[number].key] == known[was[number].key] for number in differing)
