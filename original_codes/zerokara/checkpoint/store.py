"""Writing checkpoints. `save` writes one; `CheckpointStore` also makes room before it and prunes after it."""

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
from zerokara.checkpoint.state import OPTIMIZER_NAME, STATE_NAME, WEIGHTS_NAME, TrainingState
from zerokara.durable import atomic_folder, write_json
from zerokara.progress import bytes_text

SMALL_FILES_BYTES = 2**20
"""More than state.json, manifest.json and the folder itself take on a disk."""


class CheckpointStore:
    """The checkpoints of the run folder `run_dir`, pruned by `retention`; for its one writer."""

    def __init__(self, run_dir: Path, retention: Retention, log: Callable[[str], None], newest: Path | None = None):
        """`newest` is the checkpoint that the run resumed from."""
        self.run_dir, self.newest = run_dir, newest
        self._retention, self._log = retention, log

    def save(self, state: TrainingState, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> Path:
        """Save a checkpoint, delete those that are no longer kept, and return its folder.

        Raises:
            OSError: the disk has no room or cannot be written; nothing is left of the attempt.
        """
        self._require_room(SMALL_FILES_BYTES + tensor_file.num_bytes(weights) + tensor_file.num_bytes(moments))
        self.newest = folder = save(self.run_dir, state, weights, moments)
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


def save(run_dir: Path, state: TrainingState, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> Path:
    """Save contiguous fp32 tensors in main memory as a checkpoint that appears whole; return its folder.

    A checkpoint of the same step is replaced if it is complete, and set aside if it is broken.

    Raises:
        OSError: the disk is full or cannot be written; nothing is left of the attempt.
    """
    started = time.monotonic()
    folder = folder_of(run_dir, state.step)
    if folder.exists() and check_sizes(folder) is None:
        set_aside(folder)
    with atomic_folder(folder) as partial:
        files = {name: partial / name for name in (WEIGHTS_NAME, OPTIMIZER_NAME, STATE_NAME)}
        hashes = {}
        for name, tensors in ((WEIGHTS_NAME, weights), (OPTIMIZER_NAME, moments)):
            sha256 = tensor_file.write(files[name], tensors)
            hashes[hashing.file_key(files[name])] = sha256
        write_json(files[STATE_NAME], asdict(state))
        hashes[hashing.file_key(files[STATE_NAME])] = hashing.sha256_of(files[STATE_NAME])
        manifest.write(
            partial / MANIFEST_NAME,
            manifest.StepSpec(step="checkpoint", settings={"shape": state.shape, "tokenizer": state.tokenizer_sha256}),
            outputs={path.stem: path for path in files.values()},
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
