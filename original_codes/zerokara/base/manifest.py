"""Manifests: what a step read, with which settings, and what it wrote, each file by its content hash.

Every step writes its manifest last, so a manifest also marks the step as complete. The manifests form a chain
(tokenizer → tokens → run → export): each names its inputs by content and never by path, so that moving a file changes
nothing and changing one byte is noticed. Format: indented JSON with the fields of `Manifest`.
"""

import hashlib
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import TypeAdapter

from zerokara import __version__
from zerokara.base.durable import write_json
from zerokara.base.errors import Fault, RunError, UserError, nearest, refuse, shown
from zerokara.base.progress import Progress, plural
from zerokara.base.resources import available_cores

SAMPLES, SAMPLE_BYTES = 256, 64 * 1024
"""Blocks that `sampled_sha256` reads of a file, and their size."""
NAME = "manifest.json"
FORMAT = 1
"""Raised when an earlier zerokara would misread what this one writes; further fields alone are no reason."""


class FileKey(NamedTuple):
    """Version of a file, known without reading it."""

    path: str  # absolute, as `shown` spells it
    bytes: int
    modified_ns: int


@dataclass(frozen=True)
class FileRecord:
    """A file by content; `path`, `bytes` and `modified_ns` only save hashing it again when nothing moved."""

    path: str
    """Absolute for an input (as `shown` spells it), or its address on a server; when published, its last two names.
    Relative to the manifest's folder for an output, so that the folder can be moved."""
    bytes: int
    sha256: str
    """For a file on a server that knows none, another content id with its kind as a prefix (``git:``)."""
    modified_ns: int


Inputs = Path | Sequence[Path | FileRecord]
Paths = Mapping[str, Inputs]


@dataclass(frozen=True)
class StepSpec:
    """Settings and inputs that determine the result of a step, independent of the place of files."""

    step: str
    settings: dict[str, Any]
    """Every setting that changes the result, by its YAML key; JSON values only, no paths."""
    inputs: Paths = field(default_factory=dict)


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
    """A newer zerokara wrote the manifest, in a format unknown to this one."""


def file_key(path: Path) -> FileKey:
    status = path.stat()
    return FileKey(shown(path.resolve()), status.st_size, status.st_mtime_ns)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(files: Iterable[Path]) -> dict[FileKey, str]:
    """Return the SHA-256 of each file, by as many threads as there are cores; shows progress if it takes long."""
    keys = {path: file_key(path) for path in files}
    keys = dict(sorted(keys.items(), key=lambda item: -item[1].bytes))  # so that all threads end together
    threads, lock, stopped = ThreadPoolExecutor(min(8, available_cores())), threading.Lock(), threading.Event()
    with threads, Progress("checking files", sum(key.bytes for key in keys.values()), "B") as progress:

        def sha256(path: Path) -> str:
            digest = hashlib.sha256()
            with open(path, "rb", buffering=0) as file:
                while not stopped.is_set() and (chunk := file.read(1024 * 1024)):
                    digest.update(chunk)
                    with lock:
                        progress.advance(len(chunk))
            return digest.hexdigest()

        try:
            return dict(zip(keys.values(), threads.map(sha256, keys), strict=True))
        finally:
            stopped.set()  # Ctrl-C must not wait for a hundred gigabytes


def sampled_sha256(paths: Iterable[Path]) -> str:
    """Hash the sizes of files and `SAMPLES` blocks spread over each: terabytes within a second; 12 digits."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(str(size).encode())
        with open(path, "rb", buffering=0) as file:
            last = max(0, size - SAMPLE_BYTES)
            for start in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, start))
    return digest.hexdigest()[:12]


def already_done(
    manifest_path: Path, spec: StepSpec, *, redo: bool = False, editable: Collection[str] = ()
) -> Manifest | None:
    """Return the manifest if this very step is complete and its outputs are unchanged; None if it has to run.

    Outputs with an `editable` path may have changed.

    Raises UserError, with a fault for each difference, if it records another step, settings or inputs, without `redo`.
    """
    if redo or not os.path.exists(manifest_path):  # an invalid name is reported elsewhere
        return None
    done = read(manifest_path)
    if done.step != spec.step:
        rule = f"was written by step {done.step!r}, not {spec.step!r}"
        raise UserError(Fault(str(manifest_path), rule, remedy="choose another output in the configuration"))
    refuse(_differences(manifest_path, done, spec))
    kept = (record for record in chain(*done.outputs.values()) if record.path not in editable)
    return done if all(is_unchanged(record, manifest_path) for record in kept) else None


def write(
    manifest_path: Path,
    spec: StepSpec,
    outputs: Paths,
    facts: dict[str, Any],
    seconds: float,
    hashes: Mapping[FileKey, str] | None = None,
    published: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Manifest:
    """Write the manifest, the last action of a step.

    `hashes` are known SHA-256 that need no computing. A `published` manifest does not reveal paths of this machine.
    `check` is called when all inputs are hashed; it raises if one has changed since the step read it.
    """
    known, folder = hashes or {}, manifest_path.parent.resolve()
    settings, facts = orjson.loads(orjson.dumps([spec.settings, facts]))  # as they read back
    made = Manifest(
        step=spec.step,
        settings=settings,
        inputs=_records(spec.inputs, (lambda path: shown("/".join(path.parts[-2:]))) if published else shown, known),
        outputs=_records(outputs, lambda path: os.path.relpath(path, folder), known),
        facts=facts,
        seconds=round(seconds, 3),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        versions={"zerokara": __version__, "python": platform.python_version()},
    )
    check()
    write_json(manifest_path, asdict(made))
    return made


def read(manifest_path: Path) -> Manifest:
    """Read a manifest; unknown fields are ignored.

    Raises:
        UserError: there is none, or it is not one of ours.
        NewerFormatError: a newer zerokara wrote it.
    """
    where = str(manifest_path)
    try:
        raw = orjson.loads(manifest_path.read_bytes())
        if raw.get("format", FORMAT) > FORMAT:
            rule = f"has manifest format {raw['format']}; this zerokara knows {FORMAT} at most"
            raise NewerFormatError(Fault(where, rule, remedy="update zerokara"))
        return TypeAdapter(Manifest).validate_python(raw)
    except FileNotFoundError:
        rule = "there is no manifest here: the step that writes it is not complete"
        raise UserError(Fault(where, rule, remedy=nearest(where))) from None
    except (ValueError, TypeError, AttributeError) as error:
        rule = f"is not a manifest ({error})"
        raise UserError(Fault(where, rule, remedy="move it and the files beside it away")) from error


def is_unchanged(record: FileRecord, manifest_path: Path) -> bool:
    """Tell whether an output has its recorded size and content; it is hashed only if its modification time differs."""
    path = manifest_path.parent / record.path
    if not path.is_file() or (status := path.stat()).st_size != record.bytes:
        return False
    return status.st_mtime_ns == record.modified_ns or sha256_of(path) == record.sha256


def _differences(manifest_path: Path, done: Manifest, spec: StepSpec) -> Iterator[Fault]:
    remedy = "--redo replaces the output; or choose another output in the configuration"
    settings = orjson.loads(orjson.dumps(spec.settings))  # so that tuples and lists compare equal
    for name in sorted(done.settings.keys() | settings.keys()):
        was, now = done.settings.get(name, "(none)"), settings.get(name, "(none)")
        if was != now:
            was, now = ("''" if value == "" else value for value in (was, now))
            yield Fault(str(manifest_path), f"was {was} when this output was made", name, now, remedy)
    known = {FileKey(r.path, r.bytes, r.modified_ns): r.sha256 for r in chain(*done.inputs.values())}
    inputs = _records(spec.inputs, shown, known)
    for name in sorted(done.inputs.keys() | inputs.keys()):
        was_files, now_files = done.inputs.get(name, []), inputs.get(name, [])
        was_contents, now_contents = ([(each.sha256, each.bytes) for each in files] for files in (was_files, now_files))
        if was_contents != now_contents:
            rule = f"has changed since this output was made (it was {_brief(was_files)})"
            yield Fault(str(manifest_path), rule, name, _brief(now_files), remedy)


def _brief(records: list[FileRecord]) -> str:
    text = f"{plural(len(records), 'file')}, {sum(record.bytes for record in records):,} bytes"
    content = records[0].sha256 if len(records) == 1 else ""  # of a remote file the name and value of its state
    return text + (f", {content}" if ":" in content else f", sha256 {content[:12]}" if content else "")


def _records(paths: Paths, name_of: Callable[[Path], str], known: Mapping[FileKey, str]) -> dict[str, list[FileRecord]]:
    """Return records of files; `name_of` gives a record's `path` for an absolute one."""
    listed = {name: [files] if isinstance(files, Path) else files for name, files in paths.items()}
    keys = {file: file_key(file) for file in chain(*listed.values()) if isinstance(file, Path)}
    hashes = {**known, **hash_files([file for file, key in keys.items() if key not in known])}
    if changed := next((key.path for key in keys.values() if key not in hashes), ""):
        raise RunError(f"{changed} changed while it was read; run the same command again when it is complete")
    records = {
        file: FileRecord(name_of(file.resolve()), key.bytes, hashes[key], key.modified_ns) for file, key in keys.items()
    }
    return {name: [records[f] if isinstance(f, Path) else f for f in files] for name, files in listed.items()}
