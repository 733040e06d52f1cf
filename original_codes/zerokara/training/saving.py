"""Saving while a run goes on: training waits while the state is copied to main memory, a thread does all the rest.

The thread of the first process writes, hashes, syncs and renames (`checkpoint.save`), deletes what is kept no longer,
and moves `latest` and `best`. There is one copy of the state, and so one save at a time: the next waits for it. Memory:
the size of a checkpoint, in the first process only.

What the disk refuses (no room, above all) ends no run: it is told, nothing is left of the attempt, and the thread tries
again every few seconds, until it succeeds or the next save takes its place. Only at the end of the run is there nothing
to go on with: then it tries for `PATIENCE_SECONDS` more, and fails.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor

from zerokara import checkpoint
from zerokara.checkpoint import Retention, TrainingState
from zerokara.errors import RunError
from zerokara.progress import bytes_text, seconds_text
from zerokara.training.compute.engine import Engine
from zerokara.training.host_memory import HostCopy
from zerokara.training.planning.run_plan import RunPlan as Preparation

RETRY_SECONDS = 5.0
"""Between two attempts of a save that the disk refused."""
PATIENCE_SECONDS = 300.0
"""How long the end of a run waits for room; below the half hour that the other processes wait for this one."""
WORD_SECONDS = 30.0
"""Between two words while somebody waits."""
_NICENESS = 10
"""Of the thread that writes: where it shares the processor with the training, the training goes first."""


class Saver:
    """Writes the checkpoints of a run, and deletes those that are kept no longer."""

    def __init__(
        self,
        preparation: Preparation,
        engine: Engine,
        device: torch.device,
        rank: int,
        log: Callable[[str], None],
        resumed_from: Path | None = None,
    ):
        self._engine, self._device, self._rank, self._log = engine, device, rank, log
        config = preparation.config
        retention = Retention(config.keep_last, config.keep_every, config.keep_best)
        self._shelf = _Shelf(preparation.run_dir, retention, resumed_from, log)
        self._copies = {"weights": HostCopy(device), "moments": HostCopy(device)}
        self._writing: _Writing | None = None

    def save(self, state: TrainingState) -> None:
        """Copy the state, and have it written; every process must call it."""
        if self._rank == 0:
            self._make_way(state.step)
        started = time.monotonic()
        copies: dict[str, dict[str, Tensor]] = {"weights": {}, "moments": {}}
        for part, gathered in (("weights", self._engine.weights()), ("moments", self._engine.moments())):
            for name, tensor in gathered:
                if self._rank == 0:
                    copies[part][name] = self._copies[part].put(name, tensor)
        for copy in self._copies.values():
            copy.finish()
        if self._rank == 0:
            waited = time.monotonic() - started
            self._writing = _Writing(self._shelf, state, copies["weights"], copies["moments"], waited)
            self._writing.start()

    def finish(self) -> None:
        """Wait until everything is written; every process must call it.

        Raises:
            RunError: the disk would not take the last checkpoint. In the first process; the others leave silently.
        """
        failure = self._last_attempts() if self._rank == 0 else ""
        failed = torch.tensor([float(bool(failure))], device=self._device)
        torch.distributed.all_reduce(failed)
        if failure:
            raise RunError(failure)
        if failed.item():
            raise SystemExit(RunError.exit_code)

    def abandon(self) -> None:
        """Let what is being written come to its end, for a process that leaves because of an error."""
        if self._writing is not None:
            self._writing.give_way()
            self._writing.join()

    def _make_way(self, step: int) -> None:
        """Wait for the save before; one that still waits for room gives way."""
        writing = self._writing
        if writing is None:
            return
        started = time.monotonic()
        writing.give_way()
        while writing.is_alive():
            writing.join(WORD_SECONDS)
            if writing.is_alive():
                waited = seconds_text(time.monotonic() - started)
                self._log(
                    f"step {step}  waiting for the checkpoint of step {writing.step} to be written, since {waited}"
                )
        waited_seconds = time.monotonic() - started
        if waited_seconds > 1:
            self._log(
                f"step {step}  waited {seconds_text(waited_seconds)} for the checkpoint of step {writing.step} to be "
                "written: save_interval is short for this disk"
            )
        if writing.failure is not None:
            raise writing.failure
        if writing.trouble:
            self._log(f"step {writing.step}  was never saved; step {step} takes its place")

    def _last_attempts(self) -> str:
        """Wait for the last save; why it failed, or nothing."""
        writing, began, told = self._writing, time.monotonic(), time.monotonic()
        while writing is not None and writing.is_alive():
            writing.join(0.2)
            waited = time.monotonic() - began
            if writing.trouble and waited > PATIENCE_SECONDS:
                writing.give_way()
                writing.join()
            elif writing.is_alive() and time.monotonic() - told >= WORD_SECONDS:
                told = time.monotonic()
                left = seconds_text(PATIENCE_SECONDS - waited)
                what = f"trying for {left} more: {writing.trouble}" if writing.trouble else "being written"
                self._log(f"the checkpoint of step {writing.step} is not yet saved, {what}")
        if writing is None:
            return ""
        if writing.failure is not None:
            raise writing.failure
        if not writing.trouble:
            return ""
        stands = f"The newest checkpoint that stands is {self._shelf.newest}" if self._shelf.newest else "None stands"
        return (
            f"the checkpoint of step {writing.step} could not be saved: {writing.trouble}. {stands}; make room, and "
            "the next start resumes from it"
        )


class _Shelf:
    """The checkpoints of a run folder, for the one thread that writes there."""

    def __init__(self, run_dir: Path, retention: Retention, resumed_from: Path | None, log: Callable[[str], None]):
        self.run_dir, self.retention, self.newest, self.log = run_dir, retention, resumed_from, log

    def put(self, state: TrainingState, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> Path:
        """Write a checkpoint.

        Raises:
            OSError: there is no room, or the disk cannot be written.
        """
        self._require_room(checkpoint.bytes_needed(weights, moments))
        folder = checkpoint.save(self.run_dir, state, weights, moments)
        self.newest = folder
        try:
            checkpoint.mark(self.run_dir)
            if checkpoint.prune(self.run_dir, self.retention):
                checkpoint.mark(self.run_dir)
        except OSError as error:  # the checkpoint stands; what was to be done beside it is done with the next
            self.log(f"step {state.step}  older checkpoints are left alone for now: {error}")
        return folder

    def _require_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.run_dir).free
        if free >= needed:
            return
        checkpoint.prune(self.run_dir, self.retention)
        free = shutil.disk_usage(self.run_dir).free
        if free < needed:
            kept = [checkpoint.folder_of(self.run_dir, step).name for step in checkpoint.all_steps(self.run_dir)[:-1]]
            kept += checkpoint.broken_names(self.run_dir)
            advice = f"; of the older checkpoints {', '.join(kept)} each takes about as much" if kept else ""
            raise OSError(
                errno.ENOSPC,
                f"{bytes_text(needed)} are needed, {bytes_text(free)} are free. Delete something on this disk{advice}",
                str(self.run_dir),
            )


class _Writing(threading.Thread):
    """One save, from the copied state to the disk. A daemon: whoever must leave at once leaves it behind."""

    def __init__(
        self,
        shelf: _Shelf,
        state: TrainingState,
        weights: dict[str, Tensor],
        moments: dict[str, Tensor],
        copy_seconds: float,
    ):
        super().__init__(name=f"save step {state.step}", daemon=True)
        self.step = state.step
        self.trouble = ""
        """What the disk said to the last attempt; empty once it succeeded."""
        self.failure: BaseException | None = None
        """What nobody foresaw."""
        self._shelf, self._copy_seconds = shelf, copy_seconds
        self._content = (state, weights, moments)
        self._gives_way = threading.Event()

    def give_way(self) -> None:
        """Make no further attempt."""
        self._gives_way.set()

    def run(self) -> None:
        """Write, as often as it takes."""
        try:
            # Only upwards: where the whole run was started with `nice`, the other way is forbidden.
            niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
            while not self._attempt():
                if self._gives_way.wait(RETRY_SECONDS):
                    return
        except BaseException as error:  # for the training thread, which raises it
            self.failure = error

    def _attempt(self) -> bool:
        started = time.monotonic()
        try:
            folder = self._shelf.put(*self._content)
        except OSError as error:
            first, self.trouble = (
                not self.trouble,
                f"{error.filename or self._shelf.run_dir}: {error.strerror or error}",
            )
            if first:
                self._shelf.log(
                    f"step {self.step}  NOT saved: {self.trouble}. Training goes on, and it is tried again every "
                    f"{RETRY_SECONDS:g} s"
                )
            return False
        after = ", after all" if self.trouble else ""
        self.trouble = ""
        took, waited = seconds_text(time.monotonic() - started), seconds_text(self._copy_seconds)
        self._shelf.log(f"step {self.step}  saved {folder} in {took}{after}; training waited {waited}")
        return True
