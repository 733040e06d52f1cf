"""Which checkpoints a run folder has, and whether they are whole.

Layout of a run folder: ``global_step100/``, ``global_step200/`` …, and the files ``latest`` and ``best`` that name the
newest and the one with the lowest validation loss. A folder counts only when its manifest, written last, is there and
every file has the size and hash recorded in it; the two files are for people and are set right at every start.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from zerokara import manifest
from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import Fault, UserError

MANIFEST_NAME = "manifest.json"
VALIDATION_FACT = "valid_loss"
"""In the manifest's facts: the validation loss of these very weights, None where they were not validated."""
PARTS = ("weights", "optimizer", "state")
"""The files of a checkpoint, as its manifest calls them."""
_NAME = re.compile(r"global_step(\d+)")


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return run_dir / f"global_step{step}"


def all_steps(run_dir: Path) -> list[int]:
    """Steps with a checkpoint folder, whole or not, ascending."""
    names = (_NAME.fullmatch(path.name) for path in run_dir.glob("global_step*") if path.is_dir())
    return sorted(int(name[1]) for name in names if name)


def check(folder: Path, parts: Collection[str] = PARTS) -> manifest.Manifest:
    """Give the manifest of a checkpoint whose `parts` are whole; what is not in them is not read.

    Raises:
        UserError: the folder is missing, half written, or a file of it was changed; says which.
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
        elif manifest.sha256_of(path) != output.sha256:
            rule = "was changed after the checkpoint was written (its SHA-256 differs)"
            faults.append(Fault(where=str(path), rule=rule, remedy="take an older checkpoint"))
    if faults:
        raise UserError(faults)
    return record


def newest_complete(run_dir: Path, tell: Callable[[str], None] = print, parts: Collection[str] = PARTS) -> Path | None:
    """The newest checkpoint whose `parts` are whole, or None; each newer one is skipped with a word to `tell`."""
    for step in reversed(all_steps(run_dir)):
        folder = folder_of(run_dir, step)
        try:
            check(folder, parts)
        except (UserError, OSError) as error:  # OSError: the disk itself fails to read it
            tell(f"skipping {folder}: {error}")
            continue
        return folder
    return None


def outline(folder: Path) -> manifest.Manifest | None:
    """As `check`, but by the sizes alone, which takes no time; None where the folder is not whole."""
    try:
        record = manifest.read(folder / MANIFEST_NAME)
        files = [output for outputs in record.outputs.values() for output in outputs]
        return record if all((folder / file.path).stat().st_size == file.bytes for file in files) else None
    except (UserError, OSError):
        return None


def sweep(run_dir: Path) -> None:
    """Delete what saves and deletions left behind that were killed; only for the process that holds the lock."""
    for leftover in run_dir.glob(f"*{PARTIAL_SUFFIX}"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Delete a checkpoint: it is gone at once, and a deletion that is cut short leaves only what `sweep` deletes."""
    doomed = folder.with_name(f"{folder.name}.old{PARTIAL_SUFFIX}")
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
