"""The content of a checkpoint, its shares, and its readers. `checkpoint.store` writes it.

=====================  ==============================================================================================
weights.safetensors    fp32 master weights by megatron-core's parameter name, unsharded, vocabulary rows padded
optimizer.safetensors  the optimizer's state in fp32 as ``<parameter>.<key>`` (`training.compute.optimizer_rules`): for
                       AdamW the moments ``<parameter>.exp_avg`` and ``<parameter>.exp_avg_sq``
state.json             `TrainingState`: everything else that a resumed run needs
manifest.json          size and SHA-256 of each file, written last
=====================  ==============================================================================================

Tensors are stored by parameter name, and not in DeepSpeed's own layout by process and partition: so any number of
processes, any ZeRO stage and the export read the same files, one process decides when it is complete, and no pickle is
ever loaded. Of W processes that write together, process k writes rows R·k//W to R·(k+1)//W of each tensor into files of
its own, ``weights-00001-of-00004.safetensors`` for k = 0 of 4; the first also those without dimensions. So a tensor is
the rows of its name in all files, in the files' order. Without torch, until a tensor is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from safetensors import safe_open

from zerokara.base.errors import Fault, UserError

if TYPE_CHECKING:
    from torch import Tensor

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
    """For the model card: last training and validation loss; and what an export takes over of `init_from`'s model."""
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
        """Validation loss of these very weights, or a task's metric, negated if more is better; the best checkpoint has
        the lowest. None if they were not validated, or it is not finite."""
        known = self.facts.get("selection_loss", self.facts.get("valid_loss"))
        loss = known if self.facts.get("valid_step") == self.step else None
        return loss if loss is not None and math.isfinite(loss) else None


def read_state(folder: Path) -> TrainingState:
    """Read the progress of a run from a checkpoint, as `parse_state`."""
    return parse_state((folder / STATE_NAME).read_bytes(), folder / STATE_NAME)


def parse_state(text: bytes | str, path: Path) -> TrainingState:
    """Parse the progress of a run; `path` is where it lies. Raises UserError if it is damaged."""
    try:
        content = orjson.loads(text)
        return TrainingState(**{**content, "recent_losses": tuple(content.get("recent_losses", ()))})
    except (orjson.JSONDecodeError, TypeError, AttributeError) as error:
        raise UserError(Fault(str(path), f"is damaged ({error})", remedy="use an older checkpoint")) from error


@dataclass(frozen=True)
class Share:
    """The part of a checkpoint that one of several processes writes."""

    index: int = 0
    """This process among them; the first puts the shares together."""
    count: int = 1

    def rows(self, shape: Sequence[int]) -> range:
        """Its rows of a whole tensor; of one without dimensions the only number counts as a row."""
        if not shape:
            return range(1 if self.index == 0 else 0)
        return range(shape[0] * self.index // self.count, shape[0] * (self.index + 1) // self.count)

    def file_name(self, part: str) -> str:
        return part + (f"-{self.index + 1:05}-of-{self.count:05}" if self.count > 1 else "") + ".safetensors"


def files_of(folder: Path, part: str) -> list[Path]:
    """Files of a checkpoint's `part` in their order. Raises UserError if one is missing."""
    counts = {int(path.stem.rpartition("-")[2]) for path in folder.glob(f"{part}-*[0-9]-of-*[0-9].safetensors")}
    count = max(counts, default=1)
    files = [folder / Share(index, count).file_name(part) for index in range(count)]
    if missing := [path for path in files if not path.exists()]:
        rule = "is missing from the checkpoint"
        raise UserError(Fault(str(path), rule, remedy="use an older checkpoint") for path in missing)
    return files


class ComputedTensors(Mapping[str, "Tensor"]):
    """Name → tensor that `compute` returns for the name, each time that it is asked for."""

    def __init__(self, names: Collection[str], compute: Callable[[str], Tensor]):
        self._names, self._compute = names, compute

    def __getitem__(self, name: str) -> Tensor:
        return self._compute(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def stored_tensors(paths: Sequence[Path]) -> ComputedTensors:
    """Name → tensor of the safetensors files at `paths`, in the order of the rows; in memory while it is used.

    A tensor that lies in one file is mapped from disk; one whose rows lie in several is put together in memory. A file
    is opened anew for each tensor (half a millisecond): safetensors keeps every page that was read of a file resident
    as long as one tensor of that opening lives, and a model that is read layer by layer would add up.
    """
    files, shapes = dict[str, list[Path]](), dict[str, list[int]]()
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                shape = file.get_slice(name).get_shape()
                shapes[name] = [shapes[name][0] + shape[0], *shape[1:]] if name in shapes else shape
                files.setdefault(name, []).append(path)

    def read(name: str) -> Tensor:
        import torch

        whole, first = torch.empty(shapes[name] if len(files[name]) > 1 else 0), 0
        for path in files[name]:
            with safe_open(path, framework="pt") as file:
                rows: Tensor = file.get_tensor(name)
            if len(files[name]) == 1:
                return rows
            whole[first : first + len(rows)].copy_(rows)
            first += len(rows)
            del rows  # beside the whole there is one part in memory
        return whole

    return ComputedTensors(files, read)


def read_weights(*folders: Path) -> Mapping[str, Tensor]:
    """Fp32 master weights by name, or the mean of several checkpoints, each read when it is asked for; raises as
    `files_of`. A mean is the fp32 sum, in the given order, divided by the number of checkpoints: the same files give
    the same bits."""
    members = [stored_tensors(files_of(folder, WEIGHTS)) for folder in folders]

    def mean(name: str) -> Tensor:
        total = members[0][name].clone()  # a mapped file is not written into
        for member in members[1:]:  # beside the sum there is one tensor in memory
            total += member[name]
        return total.div_(len(members))

    return ComputedTensors(members[0], mean) if len(members) > 1 else members[0]


def read_moments(folder: Path) -> Mapping[str, Tensor]:
    """The optimizer's state by name, as `read_weights`."""
    return stored_tensors(files_of(folder, OPTIMIZER))
