"""Asynchronous checkpointing: training waits while the state is copied to main memory; a thread writes the copy.

The thread of the first process writes, hashes, syncs, renames and prunes (`CheckpointStore`). There is one
copy of the state and therefore one save at a time: the next save waits for it. Memory: the size of a checkpoint, in the
first process.

A disk that refuses a save (no space, above all) does not end the run: the error is logged, nothing is left of the
attempt, and the thread retries every few seconds until it succeeds or the next save replaces it. At the end of the run
it retries for `PATIENCE_SECONDS` more, and then the run fails.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zerokara.checkpoint import Retention, TrainingState
from zerokara.checkpoint.store import CheckpointStore
from zerokara.errors import RunError
from zerokara.progress import seconds_text
from zerokara.training.compute.engine import Engine
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
        resumed_from: Path | None = None,
    ):
        self._engine, self._processes, self._log = engine, processes, processes.log
        self._store = CheckpointStore(run_dir, retention, self._log, newest=resumed_from)
        self._copy = HostCopy(processes.device)
        self._current: _BackgroundSave | None = None

    def save(self, state: TrainingState) -> None:
        """Copy the state and start writing it; every process must call it."""
        is_first = self._processes.is_first
        if is_first:
            self._wait_for_previous(state.step)
        started = time.monotonic()
        copies: dict[str, dict[str, Tensor]] = {"weights": {}, "moments": {}}
        for part, gathered in (("weights", self._engine.weights()), ("moments", self._engine.moments())):
            for name, tensor in gathered:
                if is_first:
                    copies[part][name] = self._copy.put(name, tensor)
        self._copy.finish()
        if is_first:
            copy_seconds = time.monotonic() - started
            self._current = _BackgroundSave(self._store, state, **copies, copy_seconds=copy_seconds, log=self._log)
            self._current.start()

    def finish(self) -> None:
        """Wait until everything is written; every process must call it.

        Raises:
            RunError: the disk did not take the last checkpoint. In the first process; the others exit silently.
        """
        failure = self._wait_for_last() if self._processes.is_first else ""
        has_failed = self._processes.from_first(int(bool(failure)))
        if failure:
            raise RunError(failure)
        if has_failed:
            raise SystemExit(RunError.exit_code)

    def abandon(self) -> None:
        """Let the current attempt end, without another one; for a process that exits because of an error."""
        if self._current is not None:
            self._current.stop_retrying()
            self._current.join()

    def _wait_for_previous(self, step: int) -> None:
        """Wait for the save before the one of `step`; one that is only waiting for disk space is given up."""
        previous = self._current
        if previous is None:
            return
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

    def _wait_for_last(self) -> str:
        """Wait for the last save; return why it failed, or nothing."""
        last = self._current
        if last is None:
            return ""
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
            return ""
        newest = f"The newest checkpoint is {self._store.newest}" if self._store.newest else "There is no checkpoint"
        return (
            f"the checkpoint of step {last.step} could not be saved: {last.disk_error}. {newest}; free some space, and "
            "the next start resumes from it"
        )


class HostCopy:
    """Fp32 tensors by name, in main memory; each copy replaces the one before.

    With a GPU the memory is pinned, so that copying runs at the speed of the bus. Pages are mapped and registered with
    CUDA here because torch rounds its own pinned memory up to powers of two: up to twice as much.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> Tensor:
        """Copy `tensor` over the earlier one with this name, and return the copy; it is valid after `finish`."""
        copy = self._tensors.get(name)
        if copy is None or copy.shape != tensor.shape:
            copy = self._tensors[name] = self._allocate(tensor.numel()).view(tensor.shape)
        # In stream order: the memory of `tensor` is not reused before it is read.
        copy.copy_(tensor, non_blocking=True)
        return copy

    def finish(self) -> None:
        """Wait until all copies are complete."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _allocate(self, count: int) -> Tensor:
        pages = mmap.mmap(-1, 4 * count)
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer and larger pages: the first copy takes less time
        tensor = torch.frombuffer(pages, dtype=torch.float32, count=count)
        if self._device.type == "cuda":
            # If it cannot be pinned (a limit on locked memory), the copy is only slower.
            torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), len(pages), 0)
        return tensor


class _BackgroundSave(threading.Thread):
    """One save, from the copied state to the disk. A daemon: a process that must exit at once does not wait for it."""

    def __init__(
        self,
        store: CheckpointStore,
        state: TrainingState,
        weights: dict[str, Tensor],
        moments: dict[str, Tensor],
        copy_seconds: float,
        log: Callable[[str], None],
    ):
        super().__init__(name=f"save step {state.step}", daemon=True)
        self.step = state.step
        self.disk_error = ""
        """What the disk answered to the last attempt; empty once one has succeeded."""
        self._unexpected_error: BaseException | None = None
        self._store, self._copy_seconds, self._log = store, copy_seconds, log
        self._content = (state, weights, moments)
        self._no_retry = threading.Event()

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
            while not self._attempt():
                if self._no_retry.wait(RETRY_SECONDS):
                    return
        except BaseException as error:
            self._unexpected_error = error

    def _attempt(self) -> bool:
        started = time.monotonic()
        try:
            folder = self._store.save(*self._content)
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
