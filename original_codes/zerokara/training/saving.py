"""Asynchronous checkpointing: training waits while the state is copied to main memory; threads write the copy.

Each process copies its share of each tensor (`checkpoint.share`), and a thread of its own writes, hashes and syncs it;
the thread of the first process renames and prunes (`CheckpointStore`). There is one copy of the state and therefore one
save at a time: the next save waits for it. Memory: the size of a checkpoint over the processes, in each.

A disk that refuses a save (no space, above all) does not end the run: the error is logged, nothing is left of the
attempt, and the thread retries every few seconds until it succeeds or the next save replaces it. At the end of the run
it retries for `PATIENCE_SECONDS` more, and then the run fails.
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from zerokara import progress
from zerokara.checkpoint import Retention, TrainingState
from zerokara.checkpoint.share import Share, cut_shapes
from zerokara.checkpoint.state import OPTIMIZER, WEIGHTS
from zerokara.checkpoint.store import CheckpointStore
from zerokara.checkpoint.writers import Writers
from zerokara.errors import RunError
from zerokara.progress import seconds_text
from zerokara.training.compute.engine import Engine, master_weights, optimizer_state, state_shapes
from zerokara.training.host_copy import HostCopy
from zerokara.training.processes.folder_sharing import FolderSharing
from zerokara.training.processes.joining import Processes

RETRY_SECONDS = 5.0
"""Between two attempts of a save that the disk refused."""
PATIENCE_SECONDS = 300.0
"""How long the end of a run waits for disk space; below the half hour that the other processes wait for this one."""
REMINDER_SECONDS = 30.0
"""Between two log lines while a save is being waited for."""
_NICENESS = 10
"""Of the writing thread: where it shares a core with the training, the training goes first."""


class Saver:
    """Writes the checkpoints of a run in the background, and deletes those that are no longer kept."""

    def __init__(
        self,
        run_dir: Path,
        retention: Retention,
        engine: Engine,
        processes: Processes,
        sharing: FolderSharing,
        resumed_from: Path | None = None,
    ):
        """`sharing` are the processes that see this run folder: together they write a checkpoint into it."""
        self._engine, self._processes, self._sharing = engine, processes, sharing
        self._share = Share(sharing.index, len(sharing.ranks))
        shapes = state_shapes(engine)
        num_bytes = 4 * sum(map(math.prod, shapes.values()))
        self._writers = Writers(self._share, processes.message_store(f"checkpoints/{sharing.ranks[0]}"))
        self._store = CheckpointStore(run_dir, retention, self._log, resumed_from, self._writers, num_bytes)
        self._copy = HostCopy(processes.device)
        self._copy.reserve({name: math.prod(shape) for name, shape in cut_shapes(self._share, shapes).items()})
        self._current: _SavingThread | None = None
        self._save: _Save | None = None
        """In the process that leads those which share a folder, the same as `_current`."""

    def save(self, state: TrainingState) -> None:
        """Copy the state and start writing it; every process must call it."""
        self._processes.from_first(lambda: self._wait_for_previous(state.step))
        if not self._processes.is_first:
            self._wait_for_previous(state.step)
        self._wait_for_own()
        started = time.monotonic()
        tensors: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, OPTIMIZER: {}}
        for part, gathered in ((WEIGHTS, master_weights(self._engine)), (OPTIMIZER, optimizer_state(self._engine))):
            for name, whole in gathered:
                if rows := self._share.rows(whole.shape):
                    tensors[part][name] = self._copy.put(name, whole[rows.start : rows.stop] if whole.dim() else whole)
        self._copy.finish()
        if self._sharing.leads:
            copy_seconds = time.monotonic() - started
            self._save = _Save(self._store, self._writers, state, tensors, copy_seconds, self._log)
            self._current = self._save
        else:
            self._current = _Share(self._writers, self._store.run_dir, state.step, tensors)
        self._current.start()

    def finish(self) -> None:
        """Wait until everything is written; every process must call it.

        Raises:
            RunError: the disk did not take the last checkpoint. In the first process; the others exit silently.
        """
        self._processes.from_first(self._wait_for_last)
        if not self._processes.is_first:
            self._wait_for_last()
        self._wait_for_own()

    def _log(self, text: str) -> None:
        """Print a line, from each process that leads; those of other machines with their names."""
        if self._processes.is_first:
            progress.log(text)
        elif self._sharing.leads:
            progress.log(f"{self._sharing.host}: {text}")

    def abandon(self) -> None:
        """Let the current attempt end, without another one; for a process that exits because of an error."""
        if self._current is not None:
            self._current.stop_retrying()
            self._current.join()

    def _wait_for_own(self) -> None:
        """Wait for this process's thread: once the first has ended, so do the others."""
        if self._current is not None:
            self._current.join()
            self._current.raise_unexpected_error()

    def _wait_for_previous(self, step: int) -> int:
        """Wait for the save before the one of `step`; one that is only waiting for disk space is given up."""
        previous = self._save
        if previous is None:
            return 0
        started = time.monotonic()
        previous.stop_retrying()
        while previous.is_alive():
            previous.join(REMINDER_SECONDS)
            if previous.is_alive():
                waited = seconds_text(time.monotonic() - started)
                self._log(f"step {step}  waiting for the checkpoint of step {previous.step} since {waited}")
        waited_seconds = time.monotonic() - started
        if waited_seconds > 1:
            self._log(
                f"step {step}  waited {seconds_text(waited_seconds)} for the checkpoint of step {previous.step}: "
                "save_interval is short for this disk"
            )
        previous.raise_unexpected_error()
        if previous.disk_error:
            self._log(f"step {previous.step}  was not saved; the checkpoint of step {step} replaces it")
        return 0

    def _wait_for_last(self) -> int:
        """Wait for the last save.

        Raises:
            RunError: it failed.
        """
        last = self._save
        if last is None:
            return 0
        started = reminded = time.monotonic()
        while last.is_alive():
            last.join(0.2)
            now = time.monotonic()
            if last.disk_error and now - started > PATIENCE_SECONDS:
                last.stop_retrying()
                last.join()
            elif last.is_alive() and now - reminded >= REMINDER_SECONDS:
                reminded = now
                left = seconds_text(PATIENCE_SECONDS - (now - started))
                status = f"retrying for {left} more: {last.disk_error}" if last.disk_error else "still being written"
                self._log(f"step {last.step}  checkpoint not saved yet, {status}")
        last.raise_unexpected_error()
        if not last.disk_error:
            return 0
        newest = f"The newest checkpoint is {self._store.newest}" if self._store.newest else "There is no checkpoint"
        raise RunError(
            f"the checkpoint of step {last.step} could not be saved: {last.disk_error}. {newest}; free some space, and "
            "the next start resumes from it"
        )


class _SavingThread(threading.Thread, ABC):
    """Writes the copied state of one step. A daemon: a process that must exit at once does not wait for it."""

    def __init__(self, step: int):
        super().__init__(name=f"save step {step}", daemon=True)
        self.step = step
        self._no_retry = threading.Event()
        self._unexpected_error: BaseException | None = None

    def stop_retrying(self) -> None:
        """Make no further attempt."""
        self._no_retry.set()

    def raise_unexpected_error(self) -> None:
        """Raise, in the training thread, what ended this one and was not the disk's answer."""
        if self._unexpected_error is not None:
            raise self._unexpected_error

    def run(self) -> None:
        """Write, with as many attempts as it takes."""
        try:
            # Only upwards: where the whole run was started with `nice`, lowering it is forbidden.
            niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
            self._write()
        except BaseException as error:
            self._unexpected_error = error

    @abstractmethod
    def _write(self) -> None:
        """Write; what the disk refuses is no error of the run."""


class _Share(_SavingThread):
    """The share of a process that is not the first, written whenever that asks for it."""

    def __init__(self, writers: Writers, run_dir: Path, step: int, tensors: dict[str, dict[str, Tensor]]):
        super().__init__(step)
        self._writers, self._run_dir, self._tensors = writers, run_dir, tensors

    def _write(self) -> None:
        self._writers.serve(self._run_dir, self._tensors, self._no_retry)


class _Save(_SavingThread):
    """One save, from the copied state to a whole checkpoint on the disk: that of the first process."""

    def __init__(
        self,
        store: CheckpointStore,
        writers: Writers,
        state: TrainingState,
        tensors: dict[str, dict[str, Tensor]],
        copy_seconds: float,
        log: Callable[[str], None],
    ):
        super().__init__(state.step)
        self.disk_error = ""
        """What the disk answered to the last attempt; empty once one has succeeded."""
        self._store, self._writers, self._state, self._tensors = store, writers, state, tensors
        self._copy_seconds, self._log = copy_seconds, log

    def _write(self) -> None:
        try:
            while not self._attempt():
                if self._no_retry.wait(RETRY_SECONDS):
                    return
        finally:
            self._writers.finish()

    def _attempt(self) -> bool:
        started = time.monotonic()
        try:
            folder = self._store.save(self._state, *self._tensors.values())
        except OSError as error:
            is_first = not self.disk_error
            self.disk_error = f"{error.filename or self._store.run_dir}: {error.strerror or error}"
            if is_first:
                self._log(
                    f"step {self.step}  checkpoint NOT saved: {self.disk_error}. Training continues; retrying every "
                    f"{RETRY_SECONDS:g} s"
                )
            return False
        retried = " after retrying" if self.disk_error else ""
        self.disk_error = ""
        seconds, waited = seconds_text(time.monotonic() - started), seconds_text(self._copy_seconds)
        self._log(f"step {self.step}  saved {folder} in {seconds}{retried}; training waited {waited}")
        return True
