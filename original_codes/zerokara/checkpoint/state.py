"""The content of a checkpoint, and its readers. `checkpoint.store` writes it.

=====================  ==============================================================================================
weights.safetensors    fp32 master weights by megatron-core's parameter name, unsharded, vocabulary rows padded
optimizer.safetensors  the optimizer's state in fp32 as ``<parameter>.<key>`` (`training.compute.optimizers`): for AdamW
                       the moments ``<parameter>.exp_avg`` and ``<parameter>.exp_avg_sq``
state.json             `TrainingState`: everything else that a resumed run needs
manifest.json          size and SHA-256 of each file, written last
=====================  ==============================================================================================

Where several processes write it, each of the first two is as many files, with rows of each tensor (`checkpoint.share`).
Tensors are stored by parameter name, and not in DeepSpeed's own layout by process and partition: so any number of
processes, any ZeRO stage and the export read the same files, one process decides when it is complete, and no pickle is
ever loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from zerokara.checkpoint import share
from zerokara.errors import Fault, UserError

if TYPE_CHECKING:  # it loads torch, which a check of the configuration does not wait for
    from zerokara.checkpoint.stored_tensors import StoredTensors

WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""The parts of a checkpoint that are tensors."""
STATE_NAME = "state.json"


@dataclass(frozen=True)
class TrainingState:
    """Progress of a run. Everything else is a pure function of this and the configuration."""

    step: int
    """Steps done, skipped ones included."""
    samples: int
    """Sequences consumed: the position in the order of the data."""
    tokens: int
    seconds: float
    """Training time over all starts of the run."""
    shape: dict[str, Any]
    """`ModelShape` as JSON."""
    tokenizer_sha256: str
    data_sha256: str
    precision: str
    facts: dict[str, Any]
    """Numbers for the model card: last training and validation loss."""
    skipped_steps: int = 0
    """Steps without an update, because of a non-finite loss or gradient or a loss spike."""
    skipped_in_row: int = 0
    """Of these, the ones since the last good step."""
    recent_losses: tuple[float, ...] = ()
    """Losses of the last good steps, oldest first, which a loss spike is measured against."""
    optimizer: str = "adamw"
    """The optimizer that optimizer.safetensors belongs to."""
    earlier_updates: int = 0
    """Updates that other optimizers made before it."""

    @property
    def updates(self) -> int:
        """Updates made by this optimizer: its step count."""
        return self.step - self.skipped_steps - self.earlier_updates

    @property
    def selection_loss(self) -> float | None:
        """What the best checkpoint has least of: the validation loss of these very weights, or a task's metric, negated
        where more is better. None if they were not validated, or it is not finite."""
        known = self.facts.get("selection_loss", self.facts.get("valid_loss"))
        loss = known if self.facts.get("valid_step") == self.step else None
        return loss if loss is not None and math.isfinite(loss) else None


def read_state(folder: Path) -> TrainingState:
    """Read the progress of a run from a checkpoint.

    Raises:
        UserError: the file is damaged.
        OSError: it cannot be read.
    """
    path = folder / STATE_NAME
    return parse_state(path.read_bytes(), path)


def parse_state(text: bytes | str, path: Path) -> TrainingState:
    """Parse the progress of a run; `path` is where it lies.

    Raises:
        UserError: it is damaged.
    """
    try:
        content = orjson.loads(text)
        return TrainingState(**{**content, "recent_losses": tuple(content.get("recent_losses", ()))})
    except (orjson.JSONDecodeError, TypeError, AttributeError) as error:
        raise UserError(Fault(str(path), f"is damaged ({error})", remedy="use an older checkpoint")) from error


def read_weights(folder: Path) -> StoredTensors:
    """Fp32 master weights by name, each read when it is asked for.

    Raises:
        UserError: a file is missing.
    """
    return _stored(folder, WEIGHTS)


def read_moments(folder: Path) -> StoredTensors:
    """The optimizer's state by name, as `read_weights`."""
    return _stored(folder, OPTIMIZER)


def _stored(folder: Path, part: str) -> StoredTensors:
    from zerokara.checkpoint.stored_tensors import StoredTensors

    return StoredTensors(share.files_of(folder, part))
