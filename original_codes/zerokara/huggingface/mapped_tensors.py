"""The tensors of a safetensors file, one at a time, mapped from disk.

The library's own function keeps every page that was read of a file as long as one of its tensors lives; here a tensor
costs what it holds, and only as long as somebody has it. The format: `checkpoint.tensor_file`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path

import orjson
import torch
from torch import Tensor

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


class MappedTensors(Mapping[str, Tensor]):
    """The tensors of a file by name; each is mapped from disk when asked for, and leaves memory with its last user."""

    def __init__(self, path: Path):
        """Read the header of `path`."""
        self._path = path
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = orjson.loads(file.read(length))
        header.pop("__metadata__", None)
        self._start, self._header = 8 + length, header

    def __getitem__(self, name: str) -> Tensor:
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        # A mapping begins at a whole page.
        before = (self._start + begin) % mmap.ALLOCATIONGRANULARITY
        with open(self._path, "rb") as file:
            # Private, so that whoever changes the tensor changes their own copy and not the file.
            pages = mmap.mmap(
                file.fileno(),
                end - begin + before,
                offset=self._start + begin - before,
                access=mmap.ACCESS_COPY,
            )
        return torch.frombuffer(pages, dtype=dtype, offset=before).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def __len__(self) -> int:
        return len(self._header)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape, without reading a tensor."""
        return {name: tuple(entry["shape"]) for name, entry in self._header.items()}
