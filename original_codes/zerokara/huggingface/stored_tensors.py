"""The tensors of a safetensors file by name, each read when it is asked for.

The file is opened anew for each tensor (half a millisecond): safetensors keeps every page that was read of a file
resident as long as one tensor of that opening lives, and a model that is read layer by layer would add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


class StoredTensors(Mapping[str, Tensor]):
    """Name → tensor, mapped from disk; its memory is free again when its last user lets go of it."""

    def __init__(self, path: Path):
        """Read the header of `path`."""
        self._path = path
        with safe_open(path, framework="pt") as file:
            self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            """Name → shape."""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        with safe_open(self._path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
