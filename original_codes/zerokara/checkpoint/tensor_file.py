"""The safetensors format, written tensor after tensor as a stream, and hashed on the way where somebody wants that.

The library's own writer holds a second copy of every tensor, and whoever wants the hash must read the file again; here
each piece goes into the hash and to the file while it is warm. Both let go of the interpreter, so that a thread can do
it while training goes on. The format, byte by byte:

======== ============================================================================================================
8 bytes  n, the length of the header, unsigned, little-endian
n bytes  JSON ``{"__metadata__": {"format": "pt"}, NAME: {"dtype": "F32", "shape": […], "data_offsets": [begin, end]},
         …}``, filled up with spaces to a multiple of 8; the dtype of bf16 is ``"BF16"``
the rest the tensors, row by row, little-endian, without gaps; ``data_offsets`` count from here
======== ============================================================================================================

Source: https://huggingface.co/docs/safetensors, safetensors 0.8.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import orjson

from zerokara.durable import BackgroundSync

if TYPE_CHECKING:  # those who only look for checkpoints need no torch
    import torch
    from torch import Tensor

_NAMES = {"torch.float32": "F32", "torch.bfloat16": "BF16"}
_PIECE_BYTES = 8 * 2**20
"""Small enough to be still in the processor's cache when it is written after it was hashed."""
_SYNC_BYTES = 128 * 2**20
"""So much is sent to the disk at a time, while the work goes on: at its end little is left to wait for."""


class Digest(Protocol):
    """What hashlib's objects are."""

    def update(self, content: memoryview, /) -> None:
        """Take in further bytes."""


class TensorWriter:
    """Writes one file, tensor after tensor in the order announced; used as a context manager.

    The file may be read by whoever may read its folder.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        ahead: BackgroundSync | None = None,
        digest: Digest | None = None,
    ):
        """Announce names and shapes of all tensors, in order.

        `ahead` sends to the disk what is written so far; `digest` is given all that is written.
        """
        self._path, self._dtype, self._ahead, self._digest = path, dtype, ahead, digest
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._left = list(self._shapes)
        self._header = header(self._shapes, dtype)
        self._unsynced = 0

    def __enter__(self) -> TensorWriter:
        # Unbuffered: what a full disk refuses must be told by `write`, not when the file is closed.
        self._file = open(self._path, "wb", buffering=0)
        os.fchmod(self._file.fileno(), self._path.parent.stat().st_mode & 0o666)
        self._put(memoryview(self._header))
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, rounded to the file's dtype.

        Raises:
            OSError: the disk is full, or cannot be written; names the file.
        """
        import torch

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
        for begin in range(0, len(content), _PIECE_BYTES):
            piece = content[begin : begin + _PIECE_BYTES]
            if self._digest is not None:
                self._digest.update(piece)
            self._write_all(piece)
            self._unsynced += len(piece)
            if self._unsynced >= _SYNC_BYTES:
                self._sync()

    def _write_all(self, piece: memoryview) -> None:
        try:
            while piece:
                piece = piece[os.write(self._file.fileno(), piece) :]
        except OSError as error:
            error.filename = str(self._path)
            self._file.close()
            raise

    def _sync(self) -> None:
        if self._ahead is not None:
            self._ahead.file(self._file.fileno(), self._path)
        self._unsynced = 0


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write fp32 tensors that are in memory anyway; gives the file's SHA-256 in hexadecimal.

    Raises:
        OSError: the disk is full, or cannot be written; names the file.
    """
    import torch

    digest = hashlib.sha256()
    with TensorWriter(path, _shapes(tensors), torch.float32, digest=digest) as writer:
        for name, tensor in tensors.items():
            assert tensor.dtype == torch.float32, f"{name} is {tensor.dtype}"
            writer.write(name, tensor)
    return digest.hexdigest()


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of the file that `write` makes."""
    import torch

    shapes = _shapes(tensors)
    return len(header(shapes, torch.float32)) + sum(nbytes(shape, torch.float32) for shape in shapes.values())


def nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor in a file."""
    return math.prod(shape) * dtype.itemsize


def header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """The length and the JSON that a file begins with, for tensors in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + nbytes(shape, dtype)
        entries[name] = {"dtype": _NAMES[str(dtype)], "shape": shape, "data_offsets": (begin, end)}
    text = orjson.dumps(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
