"""What a checkpoint holds, and how it is written and read.

=====================  ==============================================================================================
weights.safetensors    the optimizer's fp32 weights by megatron-core's parameter name, whole, vocabulary rows padded
optimizer.safetensors  the optimizer's state in fp32 as ``<parameter>.<key>`` (`training.compute.optimizers`): AdamW's
                       as ``<parameter>.exp_avg`` and ``<parameter>.exp_avg_sq``
state.json             `TrainingState`: all else that going on needs
manifest.json          size and SHA-256 of each, written last
=====================  ==============================================================================================

The layout is by parameter name and not DeepSpeed's own (which is by process and partition), because then another
number of processes, another ZeRO stage and the export all read the same file, one writer decides when it is whole, and
no pickle is ever loaded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from zerokara import manifest
from zerokara.checkpoint import tensor_file
from zerokara.checkpoint.folders import MANIFEST_NAME, VALIDATION_FACT, check_sizes, folder_of
from zerokara.checkpoint.recovery import set_aside
from zerokara.durable import atomic_folder, write_json
from zerokara.errors import Fault, UserError

if TYPE_CHECKING:  # safetensors brings torch in; only those who read tensors pay for it
    from torch import Tensor

WEIGHTS_NAME = "weights.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "state.json"


SMALL_FILES_BYTES = 2**20
"""More than state.json, manifest.json and the folder itself take on a disk."""


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands. Everything else is a pure function of this and the configuration."""

    step: int
    """Steps done, those that were skipped included."""
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
    skipped_steps: int = 0
    """Steps whose update was left out because their loss or gradient was not finite, or leapt."""
    skipped_in_row: int = 0
    """Of these, the last ones without a good step between."""
    recent_losses: tuple[float, ...] = ()
    """The last good steps', oldest first: what a leap is measured against."""
    optimizer: str = "adamw"
    """Whose state optimizer.safetensors holds."""
    earlier_updates: int = 0
    """Updates that other optimizers made before it."""

    @property
    def updates(self) -> int:
        """Updates of the weights by this optimizer: its count."""
        return self.step - self.skipped_steps - self.earlier_updates

    @property
    def validation_loss(self) -> float | None:
        """Of these very weights, where they were validated."""
        loss = self.facts.get("valid_loss") if self.facts.get("valid_step") == self.step else None
        return loss if loss is not None and math.isfinite(loss) else None


def save(run_dir: Path, state: TrainingState, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint of contiguous fp32 tensors in main memory; it appears whole.

    One of the same step that is there is replaced where it is whole, and else set aside.

    Raises:
        OSError: the disk is full or cannot be written; nothing is left of the attempt.
    """
    started = time.monotonic()
    folder = folder_of(run_dir, state.step)
    if folder.exists() and check_sizes(folder) is None:
        set_aside(folder)
    with atomic_folder(folder) as partial:
        hashes = {name: tensor_file.write(partial / name, tensors) for name, tensors in _files(weights, moments)}
        write_json(partial / STATE_NAME, asdict(state))
        manifest.write(
            partial / MANIFEST_NAME,
            manifest.StepSpec(step="checkpoint", settings={"shape": state.shape, "tokenizer": state.tokenizer_sha256}),
            outputs={name.partition(".")[0]: partial / name for name in (WEIGHTS_NAME, OPTIMIZER_NAME, STATE_NAME)},
            facts={
                "step": state.step,
                "tokens": state.tokens,
                "data_sha256": state.data_sha256,
                VALIDATION_FACT: state.validation_loss,
            },
            seconds=time.monotonic() - started,
            written={partial / name: sha256 for name, sha256 in hashes.items()},
        )
    return folder


def bytes_needed(weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> int:
    """Room on the disk that `save` takes."""
    return SMALL_FILES_BYTES + sum(tensor_file.num_bytes(tensors) for _, tensors in _files(weights, moments))


def _files(
    weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]
) -> tuple[tuple[str, Mapping[str, Tensor]], ...]:
    return (WEIGHTS_NAME, weights), (OPTIMIZER_NAME, moments)


def read_state(folder: Path) -> TrainingState:
    """Where the run stood.

    Raises:
        UserError: the file is damaged.
        OSError: it cannot be read.
    """
    path = folder / STATE_NAME
    try:
        content = orjson.loads(path.read_bytes())
        return TrainingState(**{**content, "recent_losses": tuple(content.get("recent_losses", ()))})
    except (orjson.JSONDecodeError, TypeError, AttributeError) as error:
        raise UserError(Fault(str(path), f"is damaged ({error})", remedy="take an older checkpoint")) from error


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
    """All of the optimizer's state."""
    with _opened(folder / OPTIMIZER_NAME) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
