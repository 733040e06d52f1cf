"""Writing checkpoints. `save` writes one; `CheckpointStore` also makes room before it and prunes after it.

Both are for the first of the processes that write together; the others serve it (`checkpoint.writers`).
"""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from zerokara import hashing, manifest
from zerokara.checkpoint import tensor_file
from zerokara.checkpoint.folders import MANIFEST_NAME, SELECTION_FACT, all_steps, check_sizes, folder_of
from zerokara.checkpoint.recovery import broken_names, set_aside
from zerokara.checkpoint.retention import Retention, prune, write_markers
from zerokara.checkpoint.state import OPTIMIZER, STATE_NAME, WEIGHTS, TrainingState
from zerokara.checkpoint.writers import Writers, WrittenFile, tensors_by_part, write_share
from zerokara.durable import atomic_folder, write_json
from zerokara.progress import bytes_text

SMALL_FILES_BYTES = 2**20
"""More than state.json, manifest.json and the folder itself take on a disk."""


class CheckpointStore:
    """The checkpoints of the run folder `run_dir`, pruned by `retention`; for its one writer."""

    def __init__(
        self,
        run_dir: Path,
        retention: Retention,
        log: Callable[[str], None],
        newest: Path | None = None,
        writers: Writers | None = None,
        num_bytes: int | None = None,
    ):
        """`newest` is the checkpoint that the run resumed from.

        `num_bytes` is what the tensors of one take on the disk, where `writers` are several.
        """
        self.run_dir, self.newest = run_dir, newest
        self._retention, self._log, self._writers, self._num_bytes = retention, log, writers or Writers(), num_bytes

    def save(self, state: TrainingState, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> Path:
        """Save a checkpoint from this process's share, delete those that are no longer kept, and return its folder.

        Raises:
            OSError: the disk has no room or cannot be written; nothing is left of the attempt.
        """
        num_bytes = self._num_bytes or tensor_file.num_bytes(weights) + tensor_file.num_bytes(moments)
        self._require_room(SMALL_FILES_BYTES + num_bytes)
        self.newest = folder = save(self.run_dir, state, weights, moments, self._writers)
        try:
            write_markers(self.run_dir)
            if prune(self.run_dir, self._retention):
                write_markers(self.run_dir)
        except OSError as error:  # the checkpoint is saved; the next save deletes what this one could not
            self._log(f"step {state.step}  older checkpoints are left alone for now: {error}")
        return folder

    def _require_room(self, needed: int) -> None:
        if shutil.disk_usage(self.run_dir).free >= needed:
            return
        prune(self.run_dir, self._retention)
        free = shutil.disk_usage(self.run_dir).free
        if free < needed:
            older = [folder_of(self.run_dir, step).name for step in all_steps(self.run_dir)[:-1]]
            older += broken_names(self.run_dir)
            advice = f"; each of the older checkpoints takes about as much ({', '.join(older)})" if older else ""
            raise OSError(
                errno.ENOSPC,
                f"{bytes_text(needed)} are needed, {bytes_text(free)} are free. Free some space on this disk{advice}",
                str(self.run_dir),
            )


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
    folder = folder_of(run_dir, state.step)
    if folder.exists() and check_sizes(folder) is None:
        set_aside(folder)
    with atomic_folder(folder) as partial:
        with writers.writing(partial) as others:
            written = [*write_share(partial, writers.share, tensors_by_part(weights, moments)), *others()]
        paths = {part: [partial / file.name for file in written if file.part == part] for part in (WEIGHTS, OPTIMIZER)}
        hashes = {_key(partial, file): file.sha256 for file in written}
        write_json(partial / STATE_NAME, asdict(state))
        manifest.write(
            partial / MANIFEST_NAME,
            manifest.StepSpec(step="checkpoint", settings={"shape": state.shape, "tokenizer": state.tokenizer_sha256}),
            outputs={**paths, "state": partial / STATE_NAME},
            facts={
                "step": state.step,
                "tokens": state.tokens,
                "data_sha256": state.data_sha256,
                SELECTION_FACT: state.selection_loss,
            },
            seconds=time.monotonic() - started,
            hashes=hashes,
        )
    return folder


def _key(folder: Path, file: WrittenFile) -> hashing.FileKey:
    """The key of a file that some process has written, as this one sees it.

    Raises:
        OSError: this process sees another size.
    """
    key = hashing.file_key(folder / file.name)
    if key.bytes != file.bytes:
        message = f"{file.bytes:,} bytes were written, and this process sees {key.bytes:,}: is the disk shared by all?"
        raise OSError(errno.EIO, message, str(folder / file.name))
    return key
