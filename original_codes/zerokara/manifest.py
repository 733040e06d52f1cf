"""The chain of content hashes: what a step read, with which settings, and what it wrote.

Every step writes its manifest last, so a manifest is also the mark that the step is complete. The manifests form a
chain (tokenizer → tokens → run → export): each names its inputs by content, never by place, so moving a file changes
nothing and changing one byte is noticed. Format: indented JSON with the fields of `Manifest`.
"""

from __future__ import annotations

import errno
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson

from zerokara import __version__, hashing
from zerokara.durable import write_json
from zerokara.errors import Fault, UserError, shown

FORMAT = 1
"""Raised when an earlier zerokara would misread what this one writes; further fields alone are no reason."""


@dataclass(frozen=True)
class RemoteFile:
    """An input that lies elsewhere and is known there by its content, so that it need not be read."""

    name: str
    bytes: int
    content: str
    """Its SHA-256, or another id of content with a prefix that tells which (``git:``)."""


Inputs = Path | Sequence[Path | RemoteFile]
Paths = Mapping[str, Inputs]


@dataclass(frozen=True)
class FileRecord:
    """One file by content; `path`, `bytes` and `modified_ns` only save reading it again when nothing moved."""

    path: str
    """Absolute for an input (as `shown` spells it), or where it lies on the Hub; relative to the manifest's folder for
    an output, so that a folder can be moved whole. In a folder that is published an input is its folder's name and its
    own, no more."""
    bytes: int
    sha256: str
    """For a file on the Hub that has none there: ``git:`` and its blob id."""
    modified_ns: int


@dataclass(frozen=True)
class StepSpec:
    """What a step is about to do, in terms that do not depend on where files lie."""

    step: str
    settings: dict[str, Any]
    """Every setting that changes the result; JSON values only, no paths."""
    inputs: Paths = field(default_factory=dict)
    key_of: Callable[[str], str] = str
    """What the user's YAML calls a setting or an input, where that is another name."""

    def input_files(self) -> list[Path]:
        """The inputs that lie on a disk of this machine."""
        values = ([value] if isinstance(value, Path) else value for value in self.inputs.values())
        return [file for files in values for file in files if isinstance(file, Path)]


@dataclass(frozen=True)
class Manifest:
    """The record that a step leaves beside its output."""

    step: str
    settings: dict[str, Any]
    inputs: dict[str, list[FileRecord]]
    outputs: dict[str, list[FileRecord]]
    facts: dict[str, Any]
    seconds: float
    created: str
    versions: dict[str, str]
    format: int = FORMAT


class NewerFormatError(UserError):
    """A newer zerokara wrote it, in a form that this one does not know."""


def already_done(manifest_path: Path, work: StepSpec, *, redo: bool = False) -> Manifest | None:
    """Give the manifest when the very same work is done and its outputs are still there, or None when it is to do.

    Raises:
        UserError: the manifest records other work, and `redo` is not set; names every differing field.
    """
    if redo or not _is_there(manifest_path):
        return None
    done = read(manifest_path)
    if done.step != work.step:
        rule = f"what lies here is of step {done.step!r}, not of {work.step!r}"
        raise UserError(Fault(str(manifest_path), rule, remedy="choose another output in the configuration"))
    differences = _differences(done, work)
    if differences:
        fault = Fault(
            where=str(manifest_path),
            rule="what lies here was made from something else: " + "; ".join(differences),
            remedy="run again with --redo to replace it, or choose another output in the configuration",
        )
        raise UserError(fault)
    missing = [
        record.path
        for records in done.outputs.values()
        for record in records
        if not is_unchanged(record, manifest_path)
    ]
    return None if missing else done


def write(
    manifest_path: Path,
    work: StepSpec,
    outputs: Paths,
    facts: dict[str, Any],
    seconds: float,
    known: Manifest | None = None,
    ahead: hashing.BackgroundHashes | None = None,
    written: Mapping[Path, str] | None = None,
    published: bool = False,
) -> Manifest:
    """Write the manifest, the last thing a step does.

    `known` and `ahead` save hashing inputs again; `written` are outputs that were hashed while they were written.
    A `published` manifest says nothing of where the inputs lie on this machine.
    """
    folder = manifest_path.parent
    hashes = _known_records(known) | (ahead.result() if ahead else {})
    made = Manifest(
        step=work.step,
        settings=_as_json(work.settings),
        inputs=_records(work.inputs, _last_names if published else shown, hashes),
        outputs=_records(
            outputs,
            lambda path: os.path.relpath(path, folder.resolve()),
            {hashing.Place(path).key: sha256 for path, sha256 in (written or {}).items()},
        ),
        facts=_as_json(facts),
        seconds=round(seconds, 3),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        versions={"zerokara": __version__, "python": platform.python_version()},
    )
    write_json(manifest_path, asdict(made))
    return made


def read(manifest_path: Path) -> Manifest:
    """Read a manifest; fields that are not known here are left out.

    Raises:
        UserError: there is none, or it is not one of ours.
        NewerFormatError: a newer zerokara wrote it.
        OSError: it cannot be read.
    """
    try:
        raw = orjson.loads(manifest_path.read_bytes())
        if raw.get("format", FORMAT) > FORMAT:
            rule = f"is a manifest of format {raw['format']}, and this zerokara knows {FORMAT} at most"
            raise NewerFormatError(Fault(where=str(manifest_path), rule=rule, remedy="update zerokara"))
        inputs, outputs = (
            {
                name: [FileRecord(**_known(FileRecord, record)) for record in records]
                for name, records in raw[side].items()
            }
            for side in ("inputs", "outputs")
        )
        return Manifest(**{**_known(Manifest, raw), "inputs": inputs, "outputs": outputs})
    except FileNotFoundError:
        raise UserError(
            Fault(where=str(manifest_path), rule="there is no manifest here: the step that writes it has not ended")
        ) from None
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            Fault(
                where=str(manifest_path),
                rule=f"is not a manifest ({error})",
                remedy="move it and what is beside it away",
            )
        ) from error


def _known(record_class: type[FileRecord] | type[Manifest], raw: dict[str, Any]) -> dict[str, Any]:
    return {one.name: raw[one.name] for one in fields(record_class) if one.name in raw}


def _is_there(path: Path) -> bool:
    """Whether a file is there; a name that is too long, or may not be looked at, is refused elsewhere.

    Raises:
        OSError: the disk fails, which says nothing.
    """
    try:
        return path.exists()
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.EACCES):
            return False
        raise


def _differences(done: Manifest, work: StepSpec) -> list[str]:
    found = []
    now_settings = _as_json(work.settings)
    for name in sorted(done.settings.keys() | now_settings.keys()):
        was, now = done.settings.get(name, "(none)"), now_settings.get(name, "(none)")
        if was != now:
            found.append(f"{work.key_of(name)} was {was}, is now {now}")
    now_inputs = _records(work.inputs, shown, _known_records(done))
    for name in sorted(done.inputs.keys() | now_inputs.keys()):
        was_files, now_files = done.inputs.get(name, []), now_inputs.get(name, [])
        if [record.sha256 for record in was_files] != [record.sha256 for record in now_files]:
            found.append(f"{work.key_of(name)} changed ({_brief(was_files)} then, {_brief(now_files)} now)")
    return found


def _brief(records: list[FileRecord]) -> str:
    total = sum(record.bytes for record in records)
    if len(records) == 1:
        return f"{total:,} bytes, sha256 {records[0].sha256[:12]}"
    return f"{len(records)} files, {total:,} bytes"


def _records(paths: Paths, name: Callable[[Path], str], known: dict[hashing.Key, str]) -> dict[str, list[FileRecord]]:
    """The records of files; `name` gives a record's `path` for an absolute one."""
    members = {key: [value] if isinstance(value, Path) else list(value) for key, value in paths.items()}
    places = {file: hashing.Place(file) for files in members.values() for file in files if isinstance(file, Path)}
    to_hash = {place.key: place for place in places.values() if place.key not in known}
    known = known | hashing.hashes(list(to_hash.values()))

    def record(file: Path | RemoteFile) -> FileRecord:
        if isinstance(file, RemoteFile):
            return FileRecord(path=file.name, bytes=file.bytes, sha256=file.content, modified_ns=0)
        place = places[file]
        _, size, modified_ns = place.key
        return FileRecord(path=name(place.path), bytes=size, sha256=known[place.key], modified_ns=modified_ns)

    return {key: [record(file) for file in files] for key, files in members.items()}


def _last_names(path: Path) -> str:
    return shown("/".join(path.parts[-2:]))


def _known_records(known: Manifest | None) -> dict[hashing.Key, str]:
    """Hashes that need no second reading: same path, size and modification time."""
    if known is None:
        return {}
    return {(r.path, r.bytes, r.modified_ns): r.sha256 for records in known.inputs.values() for r in records}


def is_unchanged(record: FileRecord, manifest_path: Path) -> bool:
    """Whether an output still has the size, and unless its modification time is the same too, the content recorded."""
    path = manifest_path.parent / record.path
    if not path.is_file():
        return False
    status = path.stat()
    if status.st_size != record.bytes:
        return False
    return status.st_mtime_ns == record.modified_ns or hashing.sha256_of(path) == record.sha256


def _as_json(value: Any) -> Any:
    """The value as it reads back from JSON, so that tuples and lists compare equal."""
    return orjson.loads(orjson.dumps(value))
