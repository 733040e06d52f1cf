"""The locks of a run folder: one command and one run at a time work in it.

Two files are locked (`file_lock`): ``command.lock`` by the command that the user typed, from before torch is imported
to its end; and ``lock`` by the first training process, which may outlive a command that was killed, in order to save.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from zerokara.base import file_lock
from zerokara.base.durable import made_folder
from zerokara.base.errors import RunError, UserError
from zerokara.config.pretrain_config import TrainingSettings

LOCK_NAME, COMMAND_LOCK_NAME = LOCK_NAMES = "lock", "command.lock"
LOCK_SECONDS = 60


@contextlib.contextmanager
def training_lock(run_dir: Path) -> Iterator[None]:
    """Lock a run folder for training as long as the block lasts.

    Raises:
        RunError: another process holds it, and did not release it within a minute.
    """
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(file_lock.held(run_dir / LOCK_NAME)):
            print(f"another process is training in {run_dir}; waiting for it to save and exit", flush=True)
            if not stack.enter_context(file_lock.held(run_dir / LOCK_NAME, LOCK_SECONDS)):
                rule = "another process is training here; stop it, or choose another output_model_dir"
                raise RunError(f"{run_dir}: {rule}")
        yield


@contextlib.contextmanager
def command_lock(config: TrainingSettings) -> Iterator[None]:
    """Make `output_model_dir` if it does not exist, and lock it for this command as long as the block lasts.

    Training processes that a killed command left behind, and that are still saving, are waited for. A new folder in
    which nothing was written is removed again.

    Raises:
        UserError: another command is running there; names its process.
        RunError: training processes that a killed command left behind do not end.
    """
    run_dir = Path(config.output_model_dir)
    path = run_dir / COMMAND_LOCK_NAME
    with made_folder(run_dir), file_lock.held(path) as is_ours:
        if not is_ours:
            holder = file_lock.read_holder(path)
            stop = f", stop it (kill {holder.pid}: it saves and exits)" if holder and holder.is_here else ""
            rule, remedy = f"is in use by {holder or 'another command'}", f"wait for it{stop}, or choose another folder"
            raise UserError(config.fault("output_model_dir", rule, remedy))
        if (run_dir / LOCK_NAME).exists():
            with training_lock(run_dir):
                pass
        yield
