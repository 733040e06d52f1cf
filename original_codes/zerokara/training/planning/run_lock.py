"""Locks of a run folder: one command and one run at a time.

Two files in it are locked with flock(2), which the kernel releases when a process ends, however it ends:
``command.lock`` by the command that a person typed, from before torch is imported to its end, with its process id
inside; and ``lock`` by the first training process, which may outlive a command that was killed, in order to save.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from zerokara import file_lock
from zerokara.config.training_settings import TrainingSettings
from zerokara.durable import make_folders
from zerokara.errors import RunError, UserError

LOCK_NAME = "lock"
COMMAND_LOCK_NAME = "command.lock"
NAMES = (LOCK_NAME, COMMAND_LOCK_NAME)
LOCK_SECONDS = 60
GRACE_SECONDS, _PAUSE_SECONDS = 1.0, 0.02
"""A lock may be held for an instant by `check_free`, or by a killed command until the kernel has cleaned it up."""
_DYING_SECONDS = 30.0
"""Cleaning up takes longer where the threads of the killed command wait for a core."""


def lock(run_dir: Path) -> IO[bytes]:
    """Lock a run folder for training, until the returned file is closed.

    Raises:
        RunError: another process holds it, and did not release it within a minute.
    """
    file = open(run_dir / LOCK_NAME, "ab")  # noqa: SIM115  # held open on purpose
    for attempt in range(LOCK_SECONDS):
        if file_lock.try_lock(file):
            return file
        if not attempt:
            print(f"another process is training in {run_dir}; waiting for it to save and exit", flush=True)
        time.sleep(1)
    file.close()
    raise RunError(f"{run_dir}: another process is training here; stop it first, or choose another output_model_dir")


def check_free(config: TrainingSettings) -> None:
    """Check that no other command is running in `output_model_dir`.

    Raises:
        UserError: one is; names its process.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(_path(config), "r+b") as file:
        if not _try_lock(file, config):
            raise _in_use(config)


@contextlib.contextmanager
def held(config: TrainingSettings) -> Iterator[None]:
    """Make `output_model_dir` if it does not exist, and lock it for this command as long as the block lasts.

    Training processes that a killed command left behind, and that are still saving, are waited for. A folder in which
    nothing was written meanwhile is removed afterwards.

    Raises:
        UserError: another command is running there; names its process.
        RunError: training processes that a killed command left behind do not end.
    """
    run_dir = Path(config.output_model_dir)
    made = make_folders(run_dir)
    path = _path(config)
    file = _lock_command(config)
    try:
        file_lock.write_holder(file)
        if (run_dir / LOCK_NAME).exists():
            lock(run_dir).close()
        yield
    finally:
        if file_lock.is_linked(file, path):
            path.unlink()
        file.close()
        with contextlib.suppress(OSError):  # it is not empty any more
            for folder in made:
                folder.rmdir()


def move(old: Path, new: Path) -> None:
    """Move the lock of `old`, a locked folder that was renamed, to `new`, a folder just made in its place.

    Raises:
        RunError: another command was quicker.
    """
    try:
        os.link(old / COMMAND_LOCK_NAME, new / COMMAND_LOCK_NAME)  # unlike a rename, it replaces nobody's
    except FileExistsError:
        raise RunError(f"{new}: another command has started training here") from None
    (old / COMMAND_LOCK_NAME).unlink()


def _path(config: TrainingSettings) -> Path:
    return Path(config.output_model_dir) / COMMAND_LOCK_NAME


def _lock_command(config: TrainingSettings) -> IO[bytes]:
    path = _path(config)
    while True:
        file = open(path, "ab")  # noqa: SIM115  # held open on purpose
        if not _try_lock(file, config):
            file.close()
            raise _in_use(config)
        if file_lock.is_linked(file, path):
            return file
        file.close()  # its holder has just ended and deleted the file


def _try_lock(file: IO[bytes], config: TrainingSettings) -> bool:
    """Lock a file; return False if another command holds its lock."""
    started = time.monotonic()
    while not file_lock.try_lock(file):
        waited = time.monotonic() - started
        if waited > _DYING_SECONDS or (waited > GRACE_SECONDS and not _is_dying(file_lock.read_holder(_path(config)))):
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


def _is_dying(holder: file_lock.Holder | None) -> bool:
    """Whether a process on this machine has ended, except for the kernel's cleaning up."""
    if holder is None or not holder.is_here:
        return False
    try:
        return psutil.Process(holder.pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def _in_use(config: TrainingSettings) -> UserError:
    holder = file_lock.read_holder(_path(config))
    stop = f", stop it (kill {holder.pid}: it saves and exits)" if holder and holder.is_here else ""
    rule, remedy = (
        f"is in use by {holder or 'another command'}",
        f"wait for it{stop}, or choose another output_model_dir",
    )
    return UserError(config.fault("output_model_dir", rule, remedy))
