"""The content of a checkpoint, and its readers. `checkpoint.store` writes it.

=====================  ==============================================================================================
weights.safetensors    fp32 master weights by megatron-core's parameter name, unsharded, vocabulary rows padded
optimizer.safetensors  the optimizer's state in fp32 as ``<parameter>.<key>`` (`training.compute.optimizers`): for AdamW
                       the moments ``<parameter>.exp_avg`` and ``<parameter>.exp_avg_sq``
state.json             `TrainingState`: everything else that a resumed run needs
manifest.json          size and SHA-256 of each file, written last
=====================  ==============================================================================================

Tensors are stored by parameter name, and not in DeepSpeed's own layout by process and partition: so any number of
processes, any ZeRO stage and the export read the same file, one writer decides when it is complete, and no pickle is
ever loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from safetensors import safe_open

from zerokara.errors import Fault, UserError

if TYPE_CHECKING:  # `safe_open` loads torch when a file is opened; a check of the configuration does not wait for it
    from torch import Tensor

WEIGHTS_NAME = "weights.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
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
    try:
        content = orjson.loads(path.read_bytes())
        return TrainingState(**{**content, "recent_losses": tuple(content.get("recent_losses", ()))})
    except (orjson.JSONDecodeError, TypeError, AttributeError) as error:
        raise UserError(Fault(str(path), f"is damaged ({error})", remedy="use an older checkpoint")) from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Fp32 master weights by name; views of the mapped file until they are copied or changed."""
    return _read_tensors(folder / WEIGHTS_NAME)


def read_moments(folder: Path) -> dict[str, Tensor]:
    """The optimizer's state by name, as `read_weights`."""
    return _read_tensors(folder / OPTIMIZER_NAME)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
