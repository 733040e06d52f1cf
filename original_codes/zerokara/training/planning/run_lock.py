"""Who is at work in a run folder.

Two files in it are locked with flock(2), of which the kernel lets go when a process ends, however it ends:
``command.lock`` by the command that a person typed, from before torch is loaded to its end, with its process id inside;
and ``lock`` by the first of the training processes, which may outlive a command that was killed, to save.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import orjson

from zerokara.config import PretrainConfig
from zerokara.errors import RunError, UserError

LOCK_NAME = "lock"
COMMAND_LOCK_NAME = "command.lock"
NAMES = (LOCK_NAME, COMMAND_LOCK_NAME)
LOCK_SECONDS = 60
_ATTEMPTS, _PAUSE_SECONDS = 5, 0.01
"""Whoever only looks (`check_free`) holds the lock for an instant too."""


def lock(run_dir: Path) -> IO[bytes]:
    """Keep every other process from training in this folder until the file that is given is closed.

    Raises:
        RunError: another process holds it, and did not let go within a minute.
    """
    file = open(run_dir / LOCK_NAME, "ab")  # noqa: SIM115  # held open on purpose
    for attempt in range(LOCK_SECONDS):
        if _locks(file):
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
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(_path(config), "rb") as file:
        if not _locks(file):
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
    made = _make(run_dir)
    path = _path(config)
    file = _taken(config)
    try:
        file.write(orjson.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        if (run_dir / LOCK_NAME).exists():
            lock(run_dir).close()
        yield
    finally:
        if _is_at(file, path):
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


def _make(run_dir: Path) -> list[Path]:
    """Make a folder and those above it; gives the new ones, the innermost first."""
    missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    run_dir.mkdir(parents=True, exist_ok=True)
    return missing


def _taken(config: PretrainConfig) -> IO[bytes]:
    path = _path(config)
    while True:
        file = open(path, "ab")  # noqa: SIM115  # held open on purpose
        if not any(_locks(file) for _ in range(_ATTEMPTS)):
            file.close()
            raise _in_use(config)
        if _is_at(file, path):
            file.truncate(0)
            return file
        file.close()  # its owner has just left and taken the file away


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file still has its name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _locks(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_PAUSE_SECONDS)
        return False
    return True


def _in_use(config: PretrainConfig) -> UserError:
    holder = _holder(_path(config))
    by, remedy = "another command", "wait for it"
    if holder and holder["host"] == socket.gethostname():
        by, remedy = f"process {holder['pid']}", f"wait for it, stop it (kill {holder['pid']}: it saves and leaves)"
    elif holder:
        by = f"process {holder['pid']} on {holder['host']}"
    return UserError(
        config.fault("output_model_dir", f"is in use by {by}", f"{remedy}, or choose another output_model_dir")
    )


def _holder(path: Path) -> dict[str, str | int] | None:
    """The process that holds the lock, as it says there as soon as it does."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError, orjson.JSONDecodeError):
            found: dict[str, str | int] = orjson.loads(path.read_bytes())
            return found
        time.sleep(_PAUSE_SECONDS)
    return None
