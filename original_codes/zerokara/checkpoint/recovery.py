"""What a start of a run makes of the checkpoints that it finds; only for the process that holds the run's lock.

Nothing is deleted here but what saves and deletions left behind that were killed. A checkpoint that is not whole keeps
its content under another name, ``global_step200.broken``, so that whoever knows better can give it its name back.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from zerokara import manifest
from zerokara.checkpoint.folders import DELETED_SUFFIX, PASSING, all_steps, check, folder_of, patiently, unreadable
from zerokara.durable import PARTIAL_SUFFIX, recover, unused_name
from zerokara.errors import RunError, UserError

BROKEN_SUFFIX = ".broken"
_CUT_SHORT = re.compile(r"global_step\d+\.old" + re.escape(PARTIAL_SUFFIX))
"""A save that was to replace a checkpoint was killed between two renames."""
_LEFT_OVER = re.compile(rf"(global_step\d+|.+\.\d+){re.escape(PARTIAL_SUFFIX)}|.+{re.escape(DELETED_SUFFIX)}")


def newest_to_resume(run_dir: Path, tell: Callable[[str], None] = print) -> Path | None:
    """The newest whole checkpoint, or None where there is none at all; broken ones are set aside with a word to `tell`.

    Raises:
        RunError: there are checkpoints, and none can be resumed from, or the disk does not let one be read or renamed;
            nothing was changed then.
        NewerFormatError: a newer zerokara wrote the newest.
    """
    patiently(lambda: remove_leftovers(run_dir), tell)
    refused: list[tuple[Path, str]] = []
    newest = None
    for step in reversed(patiently(lambda: all_steps(run_dir), tell)):
        folder = folder_of(run_dir, step)
        if newest is not None:  # of the older ones no content is read
            refused += _broken(folder)
            continue
        try:
            patiently(lambda: check(folder), tell)  # noqa: B023  # called at once
        except manifest.NewerFormatError:
            raise
        except UserError as error:
            refused.append((folder, str(error)))
        except OSError as error:
            if error.errno not in PASSING:
                raise RunError(f"{unreadable(error, folder)}: see to it, and run the same command again") from error
            refused.append((folder, unreadable(error, folder)))
        else:
            newest = folder
    if refused and newest is None:
        reasons = "; ".join(f"{folder.name}: {reason}" for folder, reason in refused)
        raise RunError(
            f"none of the checkpoints in {run_dir} can be resumed from, and nothing was changed: {reasons}. Put back "
            "what is missing, or run it again when the disk can be read; --redo sets this run aside and starts over"
        )
    for folder, reason in refused:
        tell(f"set aside {folder} as {set_aside(folder).name}: {reason}; delete it when you do not need it")
    return newest


def _broken(folder: Path) -> list[tuple[Path, str]]:
    try:
        check(folder, by_size_alone=True)
    except manifest.NewerFormatError:
        return []
    except UserError as error:
        return [(folder, str(error))]
    except OSError:  # nobody knows
        return []
    return []


def set_aside(folder: Path) -> Path:
    """Give a checkpoint that is not whole a name that nothing here deletes; gives the new name.

    Raises:
        RunError: it cannot be renamed.
    """
    aside = unused_name(folder, BROKEN_SUFFIX)
    try:
        os.rename(folder, aside)
    except OSError as error:
        raise RunError(f"{folder} is not whole, and cannot be renamed to {aside.name}: {error.strerror}") from error
    return aside


def broken_names(run_dir: Path) -> list[str]:
    """The names of what was set aside."""
    return sorted(path.name for path in run_dir.glob(f"global_step*{BROKEN_SUFFIX}*") if path.is_dir())


def remove_leftovers(run_dir: Path) -> None:
    """Delete what saves and deletions left behind that were killed, and complete what was cut short.

    Raises:
        OSError: the folder cannot be read.
    """
    for leftover in run_dir.iterdir():
        if _CUT_SHORT.fullmatch(leftover.name):
            recover(leftover.with_name(leftover.name.removesuffix(f".old{PARTIAL_SUFFIX}")))
        elif not _LEFT_OVER.fullmatch(leftover.name):
            continue
        elif leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
