"""The tensors of safetensors files by name, each read when it is asked for, wherever its rows lie (`checkpoint.share`).

A file is opened anew for each tensor (half a millisecond): safetensors keeps every page that was read of a file
resident as long as one tensor of that opening lives, and a model that is read layer by layer would add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


class StoredTensors(Mapping[str, Tensor]):
    """Name → tensor; its memory is free again when its last user lets go of it.

    A tensor that lies in one file is mapped from disk; one whose rows lie in several is put together in memory.
    """

    def __init__(self, paths: Sequence[Path]):
        """Read the headers of the files at `paths`, in the order of the rows."""
        self._paths: dict[str, list[Path]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name → shape of the whole tensor."""
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # no mapping
                    shape = tuple(file.get_slice(name).get_shape())
                    known = self.shapes.get(name)
                    self.shapes[name] = (known[0] + shape[0], *shape[1:]) if known else shape
                    self._paths.setdefault(name, []).append(path)

    def __getitem__(self, name: str) -> Tensor:
        paths = self._paths[name]
        if len(paths) == 1:
            return _read(paths[0], name)
        whole, first = torch.empty(self.shapes[name]), 0
        for path in paths:  # one after another: beside the whole there is one part in memory
            rows = _read(path, name)
            whole[first : first + len(rows)].copy_(rows)
            first += len(rows)
            del rows
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
