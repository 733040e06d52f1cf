"""Who is at work in a run folder.

Two files in it are locked with flock(2), of which the kernel lets go when a process ends, however it ends:
``command.lock`` by the command that a person typed, from before torch is loaded to its end, with its process id inside;
and ``lock`` by the first of the training processes, which may outlive a command that was killed, to save.
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
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.durable import make_folders
from zerokara.errors import RunError, UserError

LOCK_NAME = "lock"
COMMAND_LOCK_NAME = "command.lock"
NAMES = (LOCK_NAME, COMMAND_LOCK_NAME)
LOCK_SECONDS = 60
_GRACE_SECONDS, _PAUSE_SECONDS = 1.0, 0.02
"""Whoever only looks (`check_free`) holds the lock for an instant too, and a command that was killed until the kernel
has cleared up behind it."""
_DYING_SECONDS = 30.0
"""That takes longer where its threads wait for a core; it is not at work any more."""


def lock(run_dir: Path) -> IO[bytes]:
    """Keep every other process from training in this folder until the file that is given is closed.

    Raises:
        RunError: another process holds it, and did not let go within a minute.
    """
    file = open(run_dir / LOCK_NAME, "ab")  # noqa: SIM115  # held open on purpose
    for attempt in range(LOCK_SECONDS):
        if file_lock.try_lock(file):
            return file
        if not attempt:
            print(f"another process is at work in {run_dir}; waiting for it to save and leave", flush=True)
        time.sleep(1)
    file.close()
    raise RunError(f"{run_dir}: another process is training here; stop it first, or choose another output_model_dir")


def check_free(config: PretrainConfig) -> None:
    """See that no other command is at work in `output_model_dir`; only looks.

    Raises:
        UserError: one is; names its process.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(_path(config), "r+b") as file:
        if not _is_got(file, config):
            raise _in_use(config)


@contextlib.contextmanager
def held(config: PretrainConfig) -> Iterator[None]:
    """Make `output_model_dir` where it is not there, and keep every other command out of it as long as the block lasts.

    What a killed command's processes still have to save there is waited for. A folder in which nothing was written
    meanwhile is gone again afterwards.

    Raises:
        UserError: another command is at work there; names its process.
        RunError: training processes that a killed command left behind do not end.
    """
    run_dir = Path(config.output_model_dir)
    made = make_folders(run_dir)
    path = _path(config)
    file = _taken(config)
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
    """Go on holding `new`, a folder just made in the place of `old`, which was held and was renamed.

    Raises:
        RunError: another command was quicker.
    """
    try:
        os.link(old / COMMAND_LOCK_NAME, new / COMMAND_LOCK_NAME)  # unlike a rename, it replaces nobody's
    except FileExistsError:
        raise RunError(f"{new}: another command has begun to train here") from None
    (old / COMMAND_LOCK_NAME).unlink()


def _path(config: PretrainConfig) -> Path:
    return Path(config.output_model_dir) / COMMAND_LOCK_NAME


def _taken(config: PretrainConfig) -> IO[bytes]:
    path = _path(config)
    while True:
        file = open(path, "ab")  # noqa: SIM115  # held open on purpose
        if not _is_got(file, config):
            file.close()
            raise _in_use(config)
        if file_lock.is_linked(file, path):
            return file
        file.close()  # its owner has just left and taken the file away


def _is_got(file: IO[bytes], config: PretrainConfig) -> bool:
    """Take the lock, or find that another command is at work with it."""
    started = time.monotonic()
    while not file_lock.try_lock(file):
        waited = time.monotonic() - started
        if waited > _DYING_SECONDS or (waited > _GRACE_SECONDS and not _is_dying(file_lock.read_holder(_path(config)))):
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


def _is_dying(holder: file_lock.Holder | None) -> bool:
    """Whether a process on this machine has ended, but for what the kernel still has to do."""
    if holder is None or not holder.is_here:
        return False
    try:
        return psutil.Process(holder.pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def _in_use(config: PretrainConfig) -> UserError:
    holder = file_lock.read_holder(_path(config))
    stop = f", stop it (kill {holder.pid}: it saves and leaves)" if holder and holder.is_here else ""
    rule, remedy = (
        f"is in use by {holder or 'another command'}",
        f"wait for it{stop}, or choose another output_model_dir",
    )
    return UserError(config.fault("output_model_dir", rule, remedy))
