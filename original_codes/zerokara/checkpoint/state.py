"""What a checkpoint holds, and how it is written and read.

=====================  ==============================================================================================
weights.safetensors    the optimizer's fp32 weights by megatron-core's parameter name, whole, vocabulary rows padded
optimizer.safetensors  AdamW's running means in fp32 as ``<parameter>.exp_avg`` and ``<parameter>.exp_avg_sq``
state.json             `TrainingState`: all else that going on needs
manifest.json          size and SHA-256 of each, written last
=====================  ==============================================================================================

The layout is by parameter name and not DeepSpeed's own (which is by process and partition), because then another
number of processes, another ZeRO stage and the export all read the same file, one writer decides when it is whole, and
no pickle is ever loaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from zerokara import manifest
from zerokara.checkpoint.folders import LATEST_NAME, MANIFEST_NAME, folder_of
from zerokara.durable import appearing_folder, write_json, write_text

if TYPE_CHECKING:  # safetensors brings torch in; only those who read tensors pay for it
    from torch import Tensor

WEIGHTS_NAME = "weights.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "state.json"


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands. Everything else is a pure function of this and the configuration."""

    step: int
    """Updates done; also the optimizer's count."""
    samples: int
    """Sequences consumed: the position in the order of the data."""
    tokens: int
    seconds: float
    """Time spent training, over all starts of the run."""
    shape: dict[str, Any]
    """`ModelShape` as JSON."""
    tokenizer_sha256: str
    data_sha256: str
    precision: str
    facts: dict[str, Any]
    """Numbers for the model card: last training and validation loss."""


def save(run_dir: Path, state: TrainingState, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> Path:
    """Write a checkpoint; it appears whole, then `latest` names it."""
    from safetensors.torch import save_file

    started = time.monotonic()
    folder = folder_of(run_dir, state.step)
    with appearing_folder(folder) as partial:
        for name, tensors in ((WEIGHTS_NAME, weights), (OPTIMIZER_NAME, moments)):
            save_file(tensors, partial / name, metadata={"format": "pt"})
            (partial / name).chmod(0o666 & ~_umask())  # safetensors makes files that only their owner reads
        write_json(partial / STATE_NAME, asdict(state))
        manifest.finish(
            partial / MANIFEST_NAME,
            manifest.Work(step="checkpoint", settings={"shape": state.shape, "tokenizer": state.tokenizer_sha256}),
            outputs={name.partition(".")[0]: partial / name for name in (WEIGHTS_NAME, OPTIMIZER_NAME, STATE_NAME)},
            facts={"step": state.step, "tokens": state.tokens, "data_sha256": state.data_sha256},
            seconds=time.monotonic() - started,
        )
    write_text(run_dir / LATEST_NAME, folder.name + "\n")
    return folder


def _umask() -> int:
    """The process's own, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def read_state(folder: Path) -> TrainingState:
    """Where the run stood."""
    return TrainingState(**orjson.loads((folder / STATE_NAME).read_bytes()))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        yield file


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights; the tensors are views of the mapped file until they are copied or changed."""
    with _opened(folder / WEIGHTS_NAME) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping


def read_moments(folder: Path) -> dict[str, Tensor]:
    """All of the optimizer's running means."""
    with _opened(folder / OPTIMIZER_NAME) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
