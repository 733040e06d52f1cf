"""Writing checkpoints: `save` writes one; `CheckpointStore` also makes room before it and prunes after it.

Several processes write one together (`Writers`): the first says where and completes it, each writes its share. They
talk through a store of torch.distributed, by two kinds of keys: ``N``, the N-th request of the first (the name of the
folder to write into, or that no more comes for this checkpoint), and ``N/K``, the answer of process K (its files with
their hashes, or the disk's error). They use a store and no collectives, because this runs in a thread while training
uses collectives. The folder goes by its name alone, since a disk that several machines share may be mounted elsewhere.
"""

import errno
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
from torch import Tensor
from torch.distributed import Store

from zerokara.base import manifest
from zerokara.base.durable import atomic_folder, sync_folder, write_json
from zerokara.base.manifest import FileRecord
from zerokara.base.progress import bytes_text
from zerokara.checkpoint import folders, tensor_file
from zerokara.checkpoint.state import OPTIMIZER, STATE_NAME, WEIGHTS, Share, TrainingState
from zerokara.config.engine import MonitoringSettings

SMALL_FILES_BYTES = 2**20
"""More than state.json, manifest.json, the headers and the folder itself take on a disk."""
POLL_SECONDS = 0.05
"""Pause between two looks for a message."""


def write_share(folder: Path, share: Share, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, FileRecord]:
    """Write this process's rows of each tensor, by part and name, into a file for each part; it is on the disk then.

    Raises:
        OSError: the disk is full or cannot be written; names the file.
    """
    written = {}
    for part, rows in tensors.items():
        path = folder / share.file_name(part)
        sha256 = tensor_file.write(path, rows)
        if share.count > 1:  # another machine's view of a shared disk is what this one has synced
            sync_folder(path)
        status = path.stat()
        written[part] = FileRecord(path.name, status.st_size, sha256, status.st_mtime_ns)
    return written


class Writers:
    """The processes that write a run's checkpoints, as one of them sees them."""

    def __init__(self, share: Share | None = None, store: Store | None = None):
        """A single process needs no store."""
        self.share, self._store = share or Share(), store
        self._num_requests = 0
        assert store is not None or self.share.count == 1, "processes that write together talk through a store"

    def request(self, name: str) -> str:
        """Ask the others to write their shares into the folder of this name; only the first process does."""
        request = str(self._num_requests)
        self._num_requests += 1
        if self._store is not None:
            self._store.set(request, orjson.dumps(name).decode())
        return request

    def answers(self, request: str) -> list[dict[str, Any]]:
        """Wait until none of the others writes any more, and return their answers in the shares' order."""
        return [orjson.loads(self._wait_for(f"{request}/{index}")) for index in range(1, self.share.count)]

    def finish(self) -> None:
        """Tell the others that no request follows for this checkpoint; only the first process does."""
        self.request("")

    def serve(self, run_dir: Path, tensors: Mapping[str, Mapping[str, Tensor]], leave: threading.Event) -> None:
        """Write this process's share as often as the first asks, until it asks no more; all but the first call it.

        It ends at the next wait for a request where `leave` is set: the first may be gone.
        """
        assert self._store is not None
        while found := self._wait_for(request := str(self._num_requests), leave):
            self._num_requests += 1
            if not (name := orjson.loads(found)):
                return
            answer: dict[str, Any]
            try:
                answer = {"files": write_share(run_dir / name, self.share, tensors)}
            except OSError as error:
                answer = {"error": [error.errno, error.strerror or str(error), error.filename or str(run_dir)]}
            self._store.set(f"{request}/{self.share.index}", orjson.dumps(answer).decode())

    def _wait_for(self, key: str, leave: threading.Event | None = None) -> bytes:
        """Wait for a message; empty if `leave` was set before it came."""
        assert self._store is not None
        leave = leave or threading.Event()
        while not self._store.check([key]):
            if leave.wait(POLL_SECONDS):
                return b""
        return bytes(self._store.get(key))


@dataclass
class CheckpointStore:
    """The checkpoints of the run folder `run_dir`, pruned by ``keep_*``; for the first of its `writers`."""

    run_dir: Path
    config: MonitoringSettings
    log: Callable[[str], None]
    newest: Path | None
    """The checkpoint that the run resumed from, then the newest that was saved."""
    writers: Writers
    num_bytes: int
    """Size of the tensors of all writers."""

    def save(self, state: TrainingState, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> Path:
        """Save a checkpoint from this process's share, delete those that are no longer kept, and return its folder.

        Raises:
            OSError: the disk has no room or cannot be written; nothing is left of the attempt.
        """
        needed = SMALL_FILES_BYTES + self.num_bytes
        if shutil.disk_usage(self.run_dir).free < needed:
            folders.prune(self.run_dir, self.config)
        if (free := shutil.disk_usage(self.run_dir).free) < needed:
            older = [folders.folder_of(self.run_dir, step).name for step in folders.all_steps(self.run_dir)[:-1]]
            older += folders.broken_names(self.run_dir)
            advice = f"; each of the older checkpoints takes about as much ({', '.join(older)})" if older else ""
            message = f"{bytes_text(needed)} are needed, {bytes_text(free)} are free. Free some space on this disk"
            raise OSError(errno.ENOSPC, message + advice, str(self.run_dir))
        self.newest = folder = save(self.run_dir, state, weights, moments, self.writers)
        try:
            folders.write_markers(self.run_dir)
            if folders.prune(self.run_dir, self.config):
                folders.write_markers(self.run_dir)
        except OSError as error:  # the checkpoint is saved; the next save deletes what this one could not
            self.log(f"step {state.step}  older checkpoints are left alone for now: {error}")
        return folder


def save(
    run_dir: Path,
    state: TrainingState,
    weights: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
    writers: Writers | None = None,
) -> Path:
    """Save contiguous fp32 tensors in main memory as a checkpoint that appears whole; return its folder.

    The tensors are this process's rows, where `writers` are several. A checkpoint of the same step is replaced if it is
    complete, and set aside if it is broken.

    Raises:
        OSError: the disk is full or cannot be written; nothing is left of the attempt.
    """
    started, writers = time.monotonic(), writers or Writers()
    folder = folders.folder_of(run_dir, state.step)
    if folder.exists() and folders.check_sizes(folder) is None:
        folders.set_aside(folder)
    with atomic_folder(folder) as partial:
        request = writers.request(partial.name)
        try:
            written = [write_share(partial, writers.share, {WEIGHTS: weights, OPTIMIZER: moments})]
        finally:  # where this process fails, too: none may write when the folder goes
            answers = writers.answers(request)
        for answer in answers:
            if "error" in answer:
                raise OSError(*answer["error"])
            written.append({part: FileRecord(**record) for part, record in answer["files"].items()})
        files = {part: [share[part] for share in written] for part in (WEIGHTS, OPTIMIZER)}
        for file in chain(*files.values()):
            path = partial / file.path
            if (size := path.stat().st_size) != file.bytes:
                rule = f"{file.bytes:,} bytes were written, and this process sees {size:,}: is the disk shared by all?"
                raise OSError(errno.EIO, rule, str(path))
        write_json(partial / STATE_NAME, asdict(state))
        manifest.write(
            partial / manifest.NAME,
            manifest.StepSpec(step="checkpoint", settings={"shape": state.shape, "tokenizer": state.tokenizer_sha256}),
            outputs={**files, "state": partial / STATE_NAME},
            facts={
                "step": state.step,
                "tokens": state.tokens,
                "data_sha256": state.data_sha256,
                folders.SELECTION_FACT: state.selection_loss,
                folders.VALID_FACT: state.facts.get(folders.VALID_FACT),
            },
            seconds=time.monotonic() - started,
        )
    return folder
