"""The safetensors format, one tensor at a time: read by mapping, written as a stream.

The library's own functions hold a whole file in memory to write it, and keep every page that was read of it as long as
one tensor lives; here both cost one tensor. The format is described byte by byte in `checkpoint.tensor_file`, which
writes what training holds in memory anyway, and hashes it.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import orjson
import torch
from torch import Tensor

from zerokara.durable import SyncAhead

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PIECE_BYTES = 128 * 2**20
"""So much is sent to the disk at a time, while the work goes on: at its end little is left to wait for."""


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


class TensorWriter:
    """Writes one file, tensor after tensor in the order announced; used as a context manager.

    The file may be read by whoever may read its folder.
    """

    def __init__(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, ahead: SyncAhead | None = None
    ):
        """Announce names and shapes of all tensors, in order; `ahead` sends to the disk what is written so far."""
        self._path, self._dtype, self._ahead = path, dtype, ahead
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._left = list(self._shapes)
        self._header = header(self._shapes, dtype)
        self._unsynced = 0

    def __enter__(self) -> TensorWriter:
        self._file = open(self._path, "wb", buffering=0)
        os.fchmod(self._file.fileno(), self._path.parent.stat().st_mode & 0o666)
        self._put(memoryview(self._header))
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, rounded to the file's dtype.

        Raises:
            OSError: the disk is full, or cannot be written; names the file.
        """
        expected = self._left.pop(0)
        assert (name, tuple(tensor.shape)) == (expected, self._shapes[expected]), f"{name} came, {expected} is next"
        rows = tensor.detach().to("cpu", self._dtype).contiguous()
        # As bytes: Python's buffers do not know bf16.
        self._put(rows.view(-1).view(torch.uint8).numpy().data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            assert not self._left, f"no tensor came for {self._left}"
            self._sync()
        self._file.close()

    def _put(self, content: memoryview) -> None:
        while content:
            try:
                count = self._file.write(content[:_PIECE_BYTES])
            except OSError as error:
                error.filename = str(self._path)
                self._file.close()
                raise
            content = content[count:]
            self._unsynced += count
            if self._unsynced >= _PIECE_BYTES:
                self._sync()

    def _sync(self) -> None:
        if self._ahead is not None:
            self._ahead.file(self._file.fileno(), self._path)
        self._unsynced = 0


def nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor in a file."""
    return math.prod(shape) * dtype.itemsize


def header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """The length and the JSON that a file begins with, for tensors in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + nbytes(shape, dtype)
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
    text = orjson.dumps(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
