"""Which checkpoints a run folder has, and whether they are whole.

Layout of a run folder: ``global_step100/``, ``global_step200/`` …, and the files ``latest`` and ``best`` that name the
newest and the one with the lowest validation loss. A folder counts only when its manifest, written last, is there and
every file has the size and hash recorded in it; the two files are for people and are set right at every start.

What the disk fails to read (`OSError`) is neither whole nor broken: nobody knows. A network file system answers so for
a moment when its server restarts, so that is tried again for half a minute.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from zerokara import hashing, manifest
from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import Fault, RunError, UserError

IDENTITY_NAME = "run.json"
"""The file by which a folder is known as that of a run."""
MANIFEST_NAME = "manifest.json"
VALIDATION_FACT = "valid_loss"
"""In the manifest's facts: the validation loss of these very weights, None where they were not validated."""
PARTS = ("weights", "optimizer", "state")
"""The files of a checkpoint, as its manifest calls them."""
DELETED_SUFFIX = f".deleted{PARTIAL_SUFFIX}"
"""Ending of a checkpoint that is being deleted."""
PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Between the attempts to read what the disk fails to read."""
PASSING = frozenset({
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EREMOTEIO, errno.ENOTCONN,
    errno.ECONNRESET, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ESHUTDOWN, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
})  # fmt: skip
"""What may pass: a server that restarts, a network that is away, a machine that is short of something."""
_NAME = re.compile(r"global_step(\d+)")
_Answer = TypeVar("_Answer")


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return run_dir / f"global_step{step}"


def step_of(folder: Path) -> int:
    """The step of a checkpoint's folder, by its name."""
    return int(folder.name.removeprefix("global_step"))


def all_steps(run_dir: Path) -> list[int]:
    """Steps with a checkpoint folder, whole or not, ascending."""
    names = (_NAME.fullmatch(path.name) for path in run_dir.glob("global_step*") if path.is_dir())
    return sorted(int(name[1]) for name in names if name)


def check(folder: Path, parts: Collection[str] = PARTS, by_size_alone: bool = False) -> manifest.Manifest:
    """Give the manifest of a checkpoint whose `parts` are whole; what is not in them is not read.

    `by_size_alone` takes no time: no content is read.

    Raises:
        UserError: the folder is missing, half written, or a file of it was changed; says which.
        NewerFormatError: a newer zerokara wrote it.
        OSError: the disk fails to read it, so that nobody knows; names the file.
    """
    if not folder.is_dir():
        raise UserError(Fault(where=str(folder), rule="there is no such checkpoint"))
    if not (folder / MANIFEST_NAME).exists():
        remedy = "it was not written to its end; take another checkpoint of the run folder, or delete this one"
        raise UserError(
            Fault(where=str(folder), rule="is a half-written checkpoint: manifest.json is missing", remedy=remedy)
        )
    record = manifest.read(folder / MANIFEST_NAME)
    faults = [
        Fault(
            where=str(folder / MANIFEST_NAME), rule=f"does not speak of the {part}", remedy="take an older checkpoint"
        )
        for part in parts
        if part not in record.outputs
    ]
    for output in (output for part in parts for output in record.outputs.get(part, [])):
        path = folder / output.path
        if not path.is_file():
            faults.append(Fault(where=str(path), rule="is missing from the checkpoint"))
        elif path.stat().st_size != output.bytes:
            rule = f"has {path.stat().st_size:,} bytes where the checkpoint was written with {output.bytes:,}"
            faults.append(Fault(where=str(path), rule=rule, remedy="take an older checkpoint"))
        elif not by_size_alone and hashing.sha256_of(path) != output.sha256:
            rule = "was changed after the checkpoint was written (its SHA-256 differs)"
            faults.append(Fault(where=str(path), rule=rule, remedy="take an older checkpoint"))
    if faults:
        raise UserError(faults)
    return record


def newest_complete(run_dir: Path, tell: Callable[[str], None] = print, parts: Collection[str] = PARTS) -> Path | None:
    """The newest checkpoint whose `parts` are whole, or None; each newer one is skipped with a word to `tell`.

    Raises:
        RunError: the disk fails to read one that may be newer.
        NewerFormatError: a newer zerokara wrote the newest.
    """
    for step in reversed(all_steps(run_dir)):
        folder = folder_of(run_dir, step)
        try:
            patiently(lambda: check(folder, parts), tell)  # noqa: B023  # called at once
        except manifest.NewerFormatError:
            raise
        except UserError as error:
            tell(f"skipping {folder}: {error}")
            continue
        except OSError as error:
            raise RunError(
                f"{folder} may be whole, but {unreadable(error, folder)}. Run the same command again once it can be "
                "read, or name an older checkpoint"
            ) from error
        return folder
    return None


def patiently(read: Callable[[], _Answer], tell: Callable[[str], None] = print) -> _Answer:
    """Give what `read` gives, trying again for half a minute where the disk fails in a way that may pass.

    Raises:
        OSError: it still fails, or in a way that will not pass.
    """
    for pause in PAUSES_SECONDS:
        try:
            return read()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            tell(f"{unreadable(error)}; trying again in {pause:g} s")
            time.sleep(pause)
    return read()


def unreadable(error: OSError, place: Path | None = None) -> str:
    """``FILE cannot be read (Stale file handle)``."""
    return f"{error.filename or place or 'a file'} cannot be read ({error.strerror or error})"


def check_sizes(folder: Path) -> manifest.Manifest | None:
    """As `check`, by the sizes alone; None where nothing shows that the folder is whole."""
    try:
        return check(folder, by_size_alone=True)
    except (UserError, OSError):
        return None


def remove(folder: Path) -> None:
    """Delete a checkpoint: it is gone at once; what an interrupted deletion leaves, `remove_leftovers` deletes."""
    doomed = folder.with_name(folder.name + DELETED_SUFFIX)
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
