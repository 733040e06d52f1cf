"""The checkpoints of a run folder: which are complete, which are kept, and from which a run resumes.

Layout of a run folder: ``global_step100/``, ``global_step200/`` …, and the files ``latest`` and ``best`` that name the
newest and the one with the lowest validation loss. A folder counts only if its manifest, which is written last, exists
and every file has the recorded size and hash. The two files are for display; each start corrects them.

Only complete checkpoints are deleted, where the ones to keep are complete, and the leftovers of killed saves and
deletions. A broken checkpoint keeps its content under another name, ``global_step200.broken``, and can be given its
name back. One that the disk fails to read (`OSError`) is neither complete nor broken, but unknown. A network file
system fails this way for a moment when its server restarts, so reads are retried for half a minute.
"""

import contextlib
import errno
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, TypeVar, cast

import orjson

from zerokara.base import manifest
from zerokara.base.durable import DELETED_SUFFIX, PARTIAL_SUFFIX, recover, remove_folder, unused_name, write_file
from zerokara.base.errors import Fault, RunError, UserError, nearest
from zerokara.checkpoint.state import read_state
from zerokara.config.engine import MonitoringSettings

IDENTITY_NAME = "run.json"
"""The file that marks a folder as a run folder."""
METRICS_NAME = "metrics.jsonl"
"""The numbers of a run, a line for each step (docs/metrics.md)."""
LATEST_NAME, BEST_NAME = "latest", "best"
SELECTION_FACT, VALID_FACT = "selection_loss", "validated_on"
"""Keys of the manifest's facts: the best checkpoint has the lowest loss, None if these very weights were not validated;
losses on another text or by another metric are not compared."""
PARTS = ("weights", "optimizer", "state")
"""The files of a checkpoint, by their names in its manifest."""
EXPORTED_PARTS = ("weights", "state")
"""Those that an export reads; the optimizer state, two thirds of the bytes, it does not."""
BROKEN_SUFFIX = ".broken"
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
_INTERRUPTED_REPLACEMENT = re.compile(rf"(global_step\d+)\.old{re.escape(PARTIAL_SUFFIX)}")
"""A save that was to replace a checkpoint was killed between two renames."""
_LEFTOVER = re.compile(rf"(global_step\d+|.+\.\d+){re.escape(PARTIAL_SUFFIX)}|.+{re.escape(DELETED_SUFFIX)}")
_Result = TypeVar("_Result")


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / f"global_step{step}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("global_step"))


def _mode(path: Path) -> int:
    """Mode of a file or folder, 0 of none; OSError if the disk fails, which `Path.exists` hides from Python 3.14 on."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.stat().st_mode
    return 0


def all_steps(run_dir: Path) -> list[int]:
    """Steps with a checkpoint folder, complete or not, ascending."""
    names = (_NAME.fullmatch(path.name) for path in run_dir.glob("global_step*") if S_ISDIR(_mode(path)))
    return sorted(int(name[1]) for name in names if name)


def broken_names(run_dir: Path) -> list[str]:
    """Names of the broken checkpoints that were set aside."""
    return sorted(path.name for path in run_dir.glob(f"global_step*{BROKEN_SUFFIX}*") if path.is_dir())


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return all lines of `METRICS_NAME` but those that a crash cut short."""
    path = run_dir / METRICS_NAME
    lines = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(orjson.JSONDecodeError):
            lines.append(orjson.loads(line))
    return lines


def check(folder: Path, parts: Collection[str] = PARTS, by_size_alone: bool = False) -> manifest.Manifest:
    """Check that the `parts` of a checkpoint are complete, and return its manifest; other parts are not read.

    With `by_size_alone` no file is hashed, which takes no time.

    Raises:
        UserError: the folder is missing, incomplete, or has a changed file; names each.
        NewerFormatError: a newer zerokara wrote it.
        OSError: the disk fails to read it; names the file.
    """
    record_path = folder / manifest.NAME
    if not _mode(record_path):
        rule = "is an incomplete checkpoint: its manifest.json, which is written last, is missing"
        rule = rule if folder.is_dir() else "there is no such checkpoint"
        other = "use another checkpoint of the run"
        raise UserError(Fault(str(folder), rule, remedy=other if folder.is_dir() else nearest(folder, other)))
    record = manifest.read(record_path)
    files = {folder / file.path: file for part in parts for file in record.outputs.get(part, [])}
    missing = [part for part in parts if part not in record.outputs]
    wrong = {record_path: f"has no entry for {', '.join(missing)}"} if missing else {}
    for path, file in files.items():
        if not S_ISREG(_mode(path)):
            wrong[path] = "is missing from the checkpoint"
        elif (size := path.stat().st_size) != file.bytes:
            wrong[path] = f"has {size:,} bytes, and was saved with {file.bytes:,}"
    if not by_size_alone:
        whole = [path for path in files if path not in wrong]
        hashes = manifest.hash_files(whole)
        for path in whole:
            if hashes[manifest.file_key(path)] != files[path].sha256:
                wrong[path] = "was changed after it was saved (its SHA-256 differs)"
    if wrong:
        raise UserError(Fault(str(path), rule, remedy="use an older checkpoint") for path, rule in wrong.items())
    return record


def check_sizes(folder: Path, parts: Collection[str] = PARTS) -> manifest.Manifest | None:
    """Manifest of a checkpoint whose `parts` have the recorded sizes; None for any other."""
    try:
        return check(folder, parts, by_size_alone=True)
    except (UserError, OSError):
        return None


def with_retries(read: Callable[[], _Result], log: Callable[[str], None]) -> _Result:
    """Call `read`, retrying for half a minute if the disk fails with one of `TRANSIENT_ERRORS`.

    Raises:
        OSError: it still fails, or with another error.
    """
    for pause in RETRY_PAUSES_SECONDS:
        try:
            return read()
        except OSError as error:
            if error.errno not in TRANSIENT_ERRORS:
                raise
            log(f"{_read_error(error)}; retrying in {pause:g} s")
            time.sleep(pause)
    return read()


def _read_error(error: OSError, path: Path | None = None) -> str:
    """``FILE cannot be read (Stale file handle)``."""
    return f"{error.filename or path or 'a file'} cannot be read ({error.strerror or error})"


def newest_complete(run_dir: Path, parts: Collection[str] = PARTS) -> Path | None:
    """Newest checkpoint whose `parts` are complete, or None; prints and raises as `complete`."""
    return next(complete(run_dir, parts), None)


def complete(run_dir: Path, parts: Collection[str] = PARTS, before: float = math.inf) -> Iterator[Path]:
    """Checkpoints of steps below `before` whose `parts` are complete, newest first; prints each that is skipped.

    Raises:
        RunError: the disk fails to read one that may be newer.
        NewerFormatError: a newer zerokara wrote the newest.
    """
    for folder, error in _checked(run_dir, print, parts, before):
        if isinstance(error, OSError):
            raise RunError(
                f"{folder} may be complete, but {_read_error(error, folder)}. Run the same command again once it can "
                "be read, or name an older checkpoint"
            ) from error
        if error is None:
            yield folder
        else:
            print(f"skipping {folder}: {error}")


def _checked(
    run_dir: Path, log: Callable[[str], None], parts: Collection[str] = PARTS, before: float = math.inf
) -> Iterator[tuple[Path, UserError | OSError | None]]:
    """Yield each checkpoint of a step below `before`, newest first, with what is wrong with it, if anything is."""
    for step in reversed(with_retries(lambda: all_steps(run_dir), log)):
        if step >= before:
            continue
        folder, wrong = folder_of(run_dir, step), cast(UserError | OSError | None, None)
        try:
            with_retries(lambda: check(folder, parts), log)  # noqa: B023  # called at once
        except manifest.NewerFormatError:
            raise
        except (UserError, OSError) as error:
            wrong = error
        yield folder, wrong


def newest_to_resume(run_dir: Path, log: Callable[[str], None] = print) -> Path | None:
    """Newest complete checkpoint, or None if there is none at all; broken ones after it are set aside, and logged.

    Only for the process that holds the run's lock.

    Raises:
        RunError: there are checkpoints, but none to resume from, or the disk cannot read or rename one; nothing was
            changed then.
        NewerFormatError: a newer zerokara wrote the newest.
    """
    with_retries(lambda: remove_leftovers(run_dir), log)
    broken: list[tuple[Path, str]] = []
    newest = None
    for folder, error in _checked(run_dir, log):
        if error is None:
            newest = folder
            break
        reason = _read_error(error, folder) if isinstance(error, OSError) else str(error)
        if isinstance(error, OSError) and error.errno not in TRANSIENT_ERRORS:
            raise RunError(f"{reason}: fix that, and run the same command again") from error
        broken.append((folder, reason))
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
    """Give a broken checkpoint a name under which nothing here deletes it; return that name, or raise RunError."""
    aside = unused_name(folder, BROKEN_SUFFIX)
    try:
        os.rename(folder, aside)
    except OSError as error:
        raise RunError(f"{folder} is broken, and cannot be renamed to {aside.name}: {error.strerror}") from error
    return aside


def remove_leftovers(run_dir: Path) -> None:
    """Delete the leftovers of killed saves and deletions, and complete an interrupted replacement."""
    for path in run_dir.iterdir():
        if replaced := _INTERRUPTED_REPLACEMENT.fullmatch(path.name):
            recover(run_dir / replaced[1])
        elif _LEFTOVER.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def prune(run_dir: Path, config: MonitoringSettings) -> list[Path]:
    """Delete the complete checkpoints that the settings ``keep_*`` do not keep, and return their folders.

    Each is renamed first, so that none is there in part; `remove_leftovers` completes an interrupted deletion.
    """
    losses = _complete(run_dir)
    kept = {*sorted(losses)[-config.keep_last :]}
    if config.keep_every:
        kept |= {step for step in losses if step % config.keep_every == 0}
    if config.keep_best:
        kept.add(_best(losses))
    deleted = [folder_of(run_dir, step) for step in sorted(losses.keys() - kept)]
    for folder in deleted:
        remove_folder(folder)
    return deleted


def write_markers(run_dir: Path) -> None:
    """Write the names of the newest complete checkpoint and of the best by validation to `latest` and `best`."""
    losses = _complete(run_dir)
    for name, step in ((LATEST_NAME, max(losses, default=-1)), (BEST_NAME, _best(losses))):
        path = run_dir / name
        line = f"{folder_of(run_dir, step).name}\n"
        if step < 0:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_text(encoding="utf-8", errors="replace") != line:
            write_file(path, line)


def best(run_dir: Path) -> Path | None:
    """Return the best checkpoint by validation, as the file ``best`` names it; None if there is none."""
    marker = run_dir / BEST_NAME
    name = marker.read_text(encoding="utf-8", errors="replace").strip() if marker.is_file() else ""
    return run_dir / name if name and (run_dir / name).is_dir() else None


def is_much_worse(newest: Path) -> bool:
    """Tell whether the last validation of the run is more than 1 % worse than that of its best checkpoint."""
    if (folder := best(newest.parent)) is None:
        return False
    state, least = read_state(newest), read_state(folder).selection_loss
    last = replace(state, step=state.facts.get("valid_step", -1)).selection_loss  # None is not finite
    return last is None or (least is not None and last - least > 0.01 * abs(least))


def _complete(run_dir: Path) -> dict[int, float | None]:
    """Step → selection loss of each complete checkpoint; None for one that was validated otherwise than the newest."""
    records = {step: check_sizes(folder_of(run_dir, step)) for step in all_steps(run_dir)}
    facts = {step: record.facts for step, record in records.items() if record is not None}
    newest = facts[max(facts)].get(VALID_FACT) if facts else None
    return {
        step: each.get(SELECTION_FACT) if each.get(VALID_FACT, newest) == newest else None
        for step, each in facts.items()
    }


def _best(losses: dict[int, float | None]) -> int:
    """Step with the lowest loss, of equal ones the newest; -1 if none was validated."""
    validated = [(loss, -step) for step, loss in losses.items() if loss is not None]
    return -min(validated)[1] if validated else -1
