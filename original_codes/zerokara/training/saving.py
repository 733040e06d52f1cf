"""Asynchronous checkpointing: training waits while the state is copied to main memory; threads write the copy.

Each process copies its share of each tensor (`checkpoint.state`), and its thread has `checkpoint.store` write, hash and
sync it; the thread of the first process renames and prunes, too. There is one copy of the state, in each process
a share of it, and therefore one save at a time. A disk that refuses it does not end the run: the thread retries.
"""

import concurrent.futures
import contextlib
import math
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from zerokara.base.errors import RunError
from zerokara.base.progress import seconds_text
from zerokara.checkpoint import TrainingState, folder_of
from zerokara.checkpoint.state import OPTIMIZER, WEIGHTS, Share
from zerokara.checkpoint.store import CheckpointStore, Writers
from zerokara.training.compute import optimizer_rules
from zerokara.training.compute.engine import master_weights, optimizer_state
from zerokara.training.run import Run

RETRY_SECONDS = 5.0
"""Time between two attempts of a save that the disk refused."""
PATIENCE_SECONDS = 300.0
"""Time that the end of a run waits for disk space; below the half hour that the other processes wait for this one."""
REMINDER_SECONDS = 30.0
"""Time between two log lines while a save is being waited for."""
_PINNED_FOR_ALL = 1
"""cudaHostRegisterPortable: memory that counts as pinned for every device, whichever thread has registered it."""


class HostCopy:
    """Main memory for the fp32 numbers of one save, which replace those of the save before.

    With a GPU it is pinned, so that copying runs at the speed of the bus: in a thread, since that takes seconds. Here
    and not by torch, which rounds its own pinned memory up to powers of two.
    """

    def __init__(self, device: torch.device, count: int):
        self._device = device
        # Private: of shared memory, Python's default, Linux makes no huge pages.
        pages = mmap.mmap(-1, 4 * max(1, count), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer and larger pages: the first copy takes less time
        self._numbers = torch.frombuffer(pages, dtype=torch.float32)
        self._pinning = threading.Thread(target=self._pin, name="pin", daemon=True)
        if device.type == "cuda":
            self._pinning.start()

    def fill(self, parts: Mapping[str, Iterable[tuple[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
        """Copy the tensors of each part in place of all earlier ones, and return the copies by part and name."""
        used, copies = 0, {part: dict[str, Tensor]() for part in parts}
        if self._device.type == "cuda":
            self._pinning.join()
        for part, tensors in parts.items():
            for name, tensor in tensors:
                copies[part][name] = self._numbers[used : used + tensor.numel()].view(tensor.shape)
                # In stream order: the memory of `tensor` is not reused before it is read.
                copies[part][name].copy_(tensor, non_blocking=True)
                used += tensor.numel()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copies

    def _pin(self) -> None:
        torch.cuda.set_device(self._device)  # that of a new thread is GPU 0, where it would open a context
        registering = torch.cuda.cudart().cudaHostRegister
        if int(registering(self._numbers.data_ptr(), self._numbers.nbytes, _PINNED_FOR_ALL)):
            # Refused (a limit on locked memory): copying is only slower. CUDA keeps the error for whoever looks next,
            # which is the check behind any kernel: let that be this one.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device).add_(1)


class Saver:
    """Writes the checkpoints of a run in the background, and deletes those that are no longer kept."""

    def __init__(self, run: Run):
        self._engine, self._processes, config = run.engine, run.processes, run.plan.resolved
        self._log = run.processes.log_from_folder
        ranks = run.processes.folder_ranks
        self._share = Share(ranks.index(run.processes.rank), len(ranks))
        shapes = optimizer_rules.checkpoint_shapes(run.engine.optimizer.name, run.model.shape).values()
        self._writers = Writers(self._share, run.processes.message_store(f"checkpoints/{ranks[0]}"))
        newest = folder_of(run.plan.run_dir, run.state.step) if run.state.step else None
        num_bytes = run.plan.checkpoint_bytes
        self._store = CheckpointStore(run.plan.run_dir, config, self._log, newest, self._writers, num_bytes)
        own = sum(len(self._share.rows(shape)) * math.prod(shape[1:]) for shape in shapes)
        self._copy = HostCopy(run.processes.device, own)
        # On a shared core training goes first. Only upwards: where all was started with `nice`, lowering is forbidden.
        niceness = max(10, os.getpriority(os.PRIO_PROCESS, 0))
        self._thread = ThreadPoolExecutor(
            1, "save", lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        )
        self._current: Future[None] | None = None
        # Of the current save: its step, an event that forbids further attempts, and the disk's answer to the last one.
        self._step, self._no_retry, self._disk_error = 0, threading.Event(), ""

    def save(self, state: TrainingState) -> None:
        """Copy the state and start writing it; every process must call it."""
        self.finish(state.step)
        started = time.monotonic()
        weights, moments = self._own_rows(master_weights(self._engine)), self._own_rows(optimizer_state(self._engine))
        tensors = self._copy.fill({WEIGHTS: weights, OPTIMIZER: moments})
        copied = seconds_text(time.monotonic() - started)
        self._step, self._no_retry, self._disk_error = state.step, threading.Event(), ""
        if self._processes.leads:
            self._current = self._thread.submit(self._write, state, tensors, copied)
        else:  # whenever the one that leads asks for it
            self._current = self._thread.submit(self._writers.serve, self._store.run_dir, tensors, self._no_retry)

    def _own_rows(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, whole in tensors:
            if rows := self._share.rows(whole.shape):
                yield name, whole[rows.start : rows.stop] if whole.dim() else whole

    def abandon(self) -> None:
        """Let the current attempt end, without another one; for a process that exits because of an error."""
        self._no_retry.set()
        if self._current is not None:
            concurrent.futures.wait([self._current])

    def finish(self, next_step: int | None = None) -> None:
        """Wait for the save before that of `next_step`, or for the last one of a run; every process must call it.

        One that the disk refuses is given up at once, the last one after `PATIENCE_SECONDS`.

        Raises:
            RunError: the disk did not take the last one. In processes that lead; the others exit silently.
        """
        if (current := self._current) is None:
            return

        def wait() -> str:
            started = reminded = time.monotonic()
            while concurrent.futures.wait([current], timeout=0.2).not_done:
                now = time.monotonic()
                left = started - now + (PATIENCE_SECONDS if next_step is None else 0.0)
                if self._disk_error and left <= 0:
                    self._no_retry.set()
                elif now - reminded >= REMINDER_SECONDS:
                    reminded, status = now, "still being written"
                    if self._disk_error:
                        status = f"retrying for {seconds_text(left)} more: {self._disk_error}"
                    self._log(f"step {self._step}  checkpoint not saved yet, {status}")
            current.result()
            waited, newest = time.monotonic() - started, self._store.newest
            if next_step is not None and waited > 1:
                text = f"waited {seconds_text(waited)} for the checkpoint of step {self._step}"
                self._log(f"step {next_step}  {text}: save_interval is short for this disk")
            if next_step is not None and self._disk_error:
                self._log(f"step {self._step}  was not saved; the checkpoint of step {next_step} replaces it")
            elif self._disk_error:
                raise RunError(
                    f"the checkpoint of step {self._step} could not be saved: {self._disk_error}. "
                    f"{f'The newest checkpoint is {newest}' if newest else 'There is no checkpoint'}; mend the disk, "
                    "or free some space, and the next start resumes from it"
                )
            return ""

        self._processes.from_one(wait)
        if self._processes.leads and not self._processes.is_first:
            wait()
        current.result()

    def _write(self, state: TrainingState, tensors: dict[str, dict[str, Tensor]], copied: str) -> None:
        """Write a whole checkpoint, with as many attempts as it takes; `copied` is how long training waited."""
        retried = ""
        try:
            while True:
                started = time.monotonic()
                try:
                    folder = self._store.save(state, *tensors.values())
                    break
                except OSError as error:
                    self._disk_error = f"{error.filename or self._store.run_dir}: {error.strerror or error}"
                if not retried:
                    self._log(
                        f"step {state.step}  checkpoint NOT saved: {self._disk_error}. Training continues; retrying "
                        f"every {RETRY_SECONDS:g} s"
                    )
                retried = " after retrying"
                if self._no_retry.wait(RETRY_SECONDS):
                    return
        finally:
            self._writers.finish()
        self._disk_error = ""
        seconds = seconds_text(time.monotonic() - started)
        self._log(f"step {state.step}  saved {folder} in {seconds}{retried}; training waited {copied}")
