"""Which checkpoints a run folder has, and whether they are whole.

Layout of a run folder: ``global_step100/``, ``global_step200/`` …, and a file ``latest`` that names the newest. A
folder counts only when its manifest, written last, is there and every file has the size and hash recorded in it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from zerokara import manifest
from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import Fault, UserError

MANIFEST_NAME = "manifest.json"
LATEST_NAME = "latest"
_NAME = re.compile(r"global_step(\d+)")


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return run_dir / f"global_step{step}"


def all_steps(run_dir: Path) -> list[int]:
    """Steps with a checkpoint folder, whole or not, ascending."""
    names = (_NAME.fullmatch(path.name) for path in run_dir.glob("global_step*") if path.is_dir())
    return sorted(int(name[1]) for name in names if name)


def check(folder: Path) -> manifest.Manifest:
    """Give the manifest of a whole checkpoint.

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
    faults = []
    for output in (output for outputs in record.outputs.values() for output in outputs):
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


def newest_complete(run_dir: Path, tell: Callable[[str], None] = print) -> Path | None:
    """The newest whole checkpoint, or None; each newer one that is broken is skipped with a word to `tell`."""
    for step in reversed(all_steps(run_dir)):
        folder = folder_of(run_dir, step)
        try:
            check(folder)
        except UserError as error:
            tell(f"skipping {folder}: {error}")
            continue
        return folder
    return None


def sweep(run_dir: Path) -> None:
    """Delete what saves left behind that were killed; only for the process that holds the run folder's lock."""
    for leftover in run_dir.glob(f"global_step*{PARTIAL_SUFFIX}"):
        shutil.rmtree(leftover, ignore_errors=True)


def prune(run_dir: Path, keep_last: int, keep_every: int) -> list[Path]:
    """Delete all checkpoints but the newest `keep_last` and the multiples of `keep_every` steps; gives the deleted."""
    steps = all_steps(run_dir)
    doomed = [step for step in steps[:-keep_last] if not (keep_every and step % keep_every == 0)]
    for step in doomed:
        folder = folder_of(run_dir, step)
        # Without its manifest a folder no longer counts, should the deletion be cut short.
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    return [folder_of(run_dir, step) for step in doomed]
