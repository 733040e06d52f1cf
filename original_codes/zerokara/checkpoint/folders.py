"""The checkpoints of a run folder, and the check that one is complete.

Layout of a run folder: ``global_step100/``, ``global_step200/`` …, and the files ``latest`` and ``best`` that name the
newest and the one with the lowest validation loss. A folder counts only if its manifest, which is written last, exists
and every file has the recorded size and hash. The two files are for people; each start corrects them.

A checkpoint that the disk fails to read (`OSError`) is neither complete nor broken, but unknown. A network file system
fails this way for a moment when its server restarts, so reads are retried for half a minute.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from zerokara import hashing, manifest
from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import Fault, RunError, UserError
from zerokara.resources import available_cores

IDENTITY_NAME = "run.json"
"""The file that marks a folder as a run folder."""
MANIFEST_NAME = "manifest.json"
SELECTION_FACT = "selection_loss"
"""Key of the manifest's facts: what the best checkpoint has least of; None if these very weights were not validated."""
PARTS = ("weights", "optimizer", "state")
"""The files of a checkpoint, by their names in its manifest."""
DELETED_SUFFIX = f".deleted{PARTIAL_SUFFIX}"
"""Ending of a checkpoint that is being deleted."""
RETRY_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Between the attempts to read what the disk failed to read."""
TRANSIENT_ERRORS = frozenset({
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EREMOTEIO, errno.ENOTCONN,
    errno.ECONNRESET, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ESHUTDOWN, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
})  # fmt: skip
"""Error numbers of a server that restarts, a network that is down, a machine that is short of something."""
_NAME = re.compile(r"global_step(\d+)")
_Result = TypeVar("_Result")


def folder_of(run_dir: Path, step: int) -> Path:
    """Folder of the checkpoint of `step`."""
    return run_dir / f"global_step{step}"


def step_of(folder: Path) -> int:
    """Step of a checkpoint, by the name of its folder."""
    return int(folder.name.removeprefix("global_step"))


def all_steps(run_dir: Path) -> list[int]:
    """Steps with a checkpoint folder, complete or not, ascending."""
    names = (_NAME.fullmatch(path.name) for path in run_dir.glob("global_step*") if path.is_dir())
    return sorted(int(name[1]) for name in names if name)


def check(folder: Path, parts: Collection[str] = PARTS, by_size_alone: bool = False) -> manifest.Manifest:
    """Check that the `parts` of a checkpoint are complete, and return its manifest; other parts are not read.

    With `by_size_alone` no file is hashed, which takes no time.

    Raises:
        UserError: the folder is missing, incomplete, or has a changed file; names each.
        NewerFormatError: a newer zerokara wrote it.
        OSError: the disk fails to read it; names the file.
    """
    if not folder.is_dir():
        raise UserError(Fault(where=str(folder), rule="there is no such checkpoint"))
    record_path = folder / MANIFEST_NAME
    if not record_path.exists():
        rule = "is an incomplete checkpoint: its manifest.json, which is written last, is missing"
        raise UserError(Fault(str(folder), rule, remedy="use another checkpoint of the run, or delete this one"))
    record = manifest.read(record_path)
    remedy = "use an older checkpoint"
    faults = [
        Fault(str(record_path), f"has no entry for {part}", remedy=remedy)
        for part in parts
        if part not in record.outputs
    ]
    whole: dict[Path, str] = {}
    for output in (output for part in parts for output in record.outputs.get(part, [])):
        path = folder / output.path
        if not path.is_file():
            faults.append(Fault(str(path), "is missing from the checkpoint", remedy=remedy))
        elif (size := path.stat().st_size) != output.bytes:
            faults.append(Fault(str(path), f"has {size:,} bytes, and was saved with {output.bytes:,}", remedy=remedy))
        else:
            whole[path] = output.sha256
    if not by_size_alone:
        with ThreadPoolExecutor(min(hashing.MAX_THREADS, available_cores())) as threads:
            found = zip(whole, threads.map(hashing.sha256_of, whole), strict=True)
            changed = [path for path, sha256 in found if sha256 != whole[path]]
        rule = "was changed after it was saved (its SHA-256 differs)"
        faults += [Fault(str(path), rule, remedy=remedy) for path in changed]
    if faults:
        raise UserError(faults)
    return record


def newest_complete(run_dir: Path, log: Callable[[str], None] = print, parts: Collection[str] = PARTS) -> Path | None:
    """Newest checkpoint whose `parts` are complete, or None; logs each newer one that is skipped.

    Raises:
        RunError: the disk fails to read one that may be newer.
        NewerFormatError: a newer zerokara wrote the newest.
    """
    for step in reversed(all_steps(run_dir)):
        folder = folder_of(run_dir, step)
        try:
            with_retries(lambda: check(folder, parts), log)  # noqa: B023  # called at once
        except manifest.NewerFormatError:
            raise
        except UserError as error:
            log(f"skipping {folder}: {error}")
            continue
        except OSError as error:
            raise RunError(
                f"{folder} may be complete, but {read_error(error, folder)}. Run the same command again once it can be "
                "read, or name an older checkpoint"
            ) from error
        return folder
    return None


def with_retries(read: Callable[[], _Result], log: Callable[[str], None] = print) -> _Result:
    """Call `read`, retrying for half a minute where the disk fails with one of `TRANSIENT_ERRORS`.

    Raises:
        OSError: it still fails, or with another error.
    """
    for pause in RETRY_PAUSES_SECONDS:
        try:
            return read()
        except OSError as error:
            if error.errno not in TRANSIENT_ERRORS:
                raise
            log(f"{read_error(error)}; retrying in {pause:g} s")
            time.sleep(pause)
    return read()


def read_error(error: OSError, path: Path | None = None) -> str:
    """``FILE cannot be read (Stale file handle)``."""
    return f"{error.filename or path or 'a file'} cannot be read ({error.strerror or error})"


def check_sizes(folder: Path) -> manifest.Manifest | None:
    """Manifest of a checkpoint whose files have the recorded sizes; None for any other."""
    try:
        return check(folder, by_size_alone=True)
    except (UserError, OSError):
        return None


def remove(folder: Path) -> None:
    """Delete a checkpoint, atomically by renaming it first; `remove_leftovers` completes an interrupted deletion."""
    deleted = folder.with_name(folder.name + DELETED_SUFFIX)
    shutil.rmtree(deleted, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, deleted)
    shutil.rmtree(deleted, ignore_errors=True)
