"""Shares of a checkpoint: of W processes that write it, process k writes rows R·k//W to R·(k+1)//W of each tensor.

Each into files of its own, ``weights-00001-of-00004.safetensors`` for k = 0 of 4; a lone process writes
``weights.safetensors``. A tensor of no dimensions is the first process's. So a tensor is the rows of its name in all
files, one below another in the files' order, and nothing but the order of the names says how a checkpoint was cut.

Without torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerokara.errors import Fault, UserError

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Share:
    """What one of the processes writes that save together."""

    index: int = 0
    """This process among them."""
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process puts the shares together."""
        return self.index == 0

    def rows(self, shape: Sequence[int]) -> range:
        """Its rows of a whole tensor; of one without dimensions the only number counts as a row."""
        if not shape:
            return range(1 if self.is_first else 0)
        return range(shape[0] * self.index // self.count, shape[0] * (self.index + 1) // self.count)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of its rows of a tensor of shape `whole`."""
        return (len(self.rows(whole)), *whole[1:]) if whole else ()

    def file_name(self, part: str) -> str:
        """The name of its file of a checkpoint's `part`."""
        return part + (f"-{self.index + 1:05}-of-{self.count:05}" if self.count > 1 else "") + SUFFIX


def files_of(folder: Path, part: str) -> list[Path]:
    """The files of a checkpoint's `part` in their order.

    Raises:
        UserError: one is missing.
    """
    alone = folder / Share().file_name(part)
    name = re.compile(rf"{re.escape(part)}-\d{{5,}}-of-(\d{{5,}}){re.escape(SUFFIX)}")
    cut = sorted((path for path in folder.iterdir() if name.fullmatch(path.name)), key=lambda path: path.name)
    if not cut:
        return [alone]
    counts = {int(found[1]) for path in cut if (found := name.fullmatch(path.name))}
    wanted = [folder / Share(index, max(counts)).file_name(part) for index in range(max(counts))]
    if missing := [path for path in wanted if path not in cut]:
        rule = "is missing from the checkpoint"
        raise UserError(Fault(str(path), rule, remedy="use an older checkpoint") for path in missing)
    return wanted


def cut_shapes(share: Share, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The shapes of a share's tensors by name; those of which it has no row are left out."""
    return {name: share.shape(whole) for name, whole in shapes.items() if share.rows(whole)}
