"""Locks of a run folder: one command and one run at a time.

Two files in it are locked (`file_lock`): ``command.lock`` by the command that a person typed, from before torch is
imported to its end; and ``lock`` by the first training process, which may outlive a command that was killed, in order
to save.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from zerokara import file_lock
from zerokara.config.pretrain_config import TrainingSettings
from zerokara.durable import made_folder
from zerokara.errors import RunError, UserError

LOCK_NAME = "lock"
COMMAND_LOCK_NAME = "command.lock"
NAMES = (LOCK_NAME, COMMAND_LOCK_NAME)
LOCK_SECONDS = 60
_DYING_SECONDS = 30.0
"""The kernel cleans up behind a killed command, which takes long where its threads wait for a core."""


def lock(run_dir: Path) -> IO[bytes]:
    """Lock a run folder for training, until the returned file is closed.

    Raises:
        RunError: another process holds it, and did not release it within a minute.
    """
    file = file_lock.acquire(run_dir / LOCK_NAME)
    if file is None:
        print(f"another process is training in {run_dir}; waiting for it to save and exit", flush=True)
        file = file_lock.acquire(run_dir / LOCK_NAME, LOCK_SECONDS)
    if file is None:
        raise RunError(f"{run_dir}: another process is training here; stop it, or choose another output_model_dir")
    return file


@contextlib.contextmanager
def held(config: TrainingSettings) -> Iterator[None]:
    """Make `output_model_dir` if it does not exist, and lock it for this command as long as the block lasts.

    Training processes that a killed command left behind, and that are still saving, are waited for. A new folder in
    which nothing was written is removed again.

    Raises:
        UserError: another command is running there; names its process.
        RunError: training processes that a killed command left behind do not end.
    """
    run_dir = Path(config.output_model_dir)
    path = run_dir / COMMAND_LOCK_NAME
    before = file_lock.read_holder(path)
    seconds = _DYING_SECONDS if before and before.has_ended else 0.0
    with made_folder(run_dir), file_lock.held(path, seconds) as is_ours:
        if not is_ours:
            holder = file_lock.read_holder(path)
            stop = f", stop it (kill {holder.pid}: it saves and exits)" if holder and holder.is_here else ""
            rule, remedy = f"is in use by {holder or 'another command'}", f"wait for it{stop}, or choose another folder"
            raise UserError(config.fault("output_model_dir", rule, remedy))
        if (run_dir / LOCK_NAME).exists():
            lock(run_dir).close()
        yield


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
