"""The start of a run: which checkpoint to resume from, and what to do with the broken ones.

Only for the process that holds the run's lock. Nothing is deleted but what killed saves and deletions left behind. A
broken checkpoint keeps its content under another name, ``global_step200.broken``, and can be given its name back.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from zerokara import manifest
from zerokara.checkpoint.folders import (
    DELETED_SUFFIX,
    TRANSIENT_ERRORS,
    all_steps,
    check,
    folder_of,
    read_error,
    with_retries,
)
from zerokara.durable import PARTIAL_SUFFIX, recover, unused_name
from zerokara.errors import RunError, UserError

BROKEN_SUFFIX = ".broken"
_INTERRUPTED_REPLACEMENT = re.compile(r"global_step\d+\.old" + re.escape(PARTIAL_SUFFIX))
"""A save that was to replace a checkpoint was killed between two renames."""
_LEFTOVER = re.compile(rf"(global_step\d+|.+\.\d+){re.escape(PARTIAL_SUFFIX)}|.+{re.escape(DELETED_SUFFIX)}")


def newest_to_resume(run_dir: Path, log: Callable[[str], None] = print) -> Path | None:
    """Newest complete checkpoint, or None where there is none at all; broken ones are set aside, and logged.

    Raises:
        RunError: there are checkpoints, but none to resume from, or the disk cannot read or rename one; nothing was
            changed then.
        NewerFormatError: a newer zerokara wrote the newest.
    """
    with_retries(lambda: remove_leftovers(run_dir), log)
    broken: list[tuple[Path, str]] = []
    newest = None
    for step in reversed(with_retries(lambda: all_steps(run_dir), log)):
        folder = folder_of(run_dir, step)
        try:
            if newest is None:
                with_retries(lambda: check(folder), log)  # noqa: B023  # called at once
                newest = folder
            else:  # the older ones are not hashed
                check(folder, by_size_alone=True)
        except manifest.NewerFormatError:
            if newest is None:
                raise
        except UserError as error:
            broken.append((folder, str(error)))
        except OSError as error:
            if newest is not None:  # unknown, and not needed
                continue
            if error.errno not in TRANSIENT_ERRORS:
                raise RunError(f"{read_error(error, folder)}: fix that, and run the same command again") from error
            broken.append((folder, read_error(error, folder)))
    if broken and newest is None:
        reasons = "; ".join(f"{folder.name}: {reason}" for folder, reason in broken)
        raise RunError(
            f"none of the checkpoints in {run_dir} can be resumed from, and nothing was changed: {reasons}. Restore "
            "what is missing, or run it again when the disk can be read; --redo sets this run aside and starts over"
        )
    for folder, reason in broken:
        log(f"set aside {folder} as {set_aside(folder).name}: {reason}; delete it when you no longer need it")
    return newest


def set_aside(folder: Path) -> Path:
    """Give a broken checkpoint a name under which nothing here deletes it; return that name.

    Raises:
        RunError: it cannot be renamed.
    """
    aside = unused_name(folder, BROKEN_SUFFIX)
    try:
        os.rename(folder, aside)
    except OSError as error:
        raise RunError(f"{folder} is broken, and cannot be renamed to {aside.name}: {error.strerror}") from error
    return aside


def broken_names(run_dir: Path) -> list[str]:
    """Names of the broken checkpoints that were set aside."""
    return sorted(path.name for path in run_dir.glob(f"global_step*{BROKEN_SUFFIX}*") if path.is_dir())


def remove_leftovers(run_dir: Path) -> None:
    """Delete what killed saves and deletions left behind, and complete an interrupted replacement.

    Raises:
        OSError: the folder cannot be read.
    """
    for path in run_dir.iterdir():
        if _INTERRUPTED_REPLACEMENT.fullmatch(path.name):
            recover(path.with_name(path.name.removesuffix(f".old{PARTIAL_SUFFIX}")))
        elif not _LEFTOVER.fullmatch(path.name):
            continue
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
