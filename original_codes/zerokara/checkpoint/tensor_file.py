"""The safetensors format, written as a stream: one tensor after another, hashed on the way if wanted.

Files are read by the library. Its writer (safetensors 0.8, `save_file`) cannot do what is needed here: it wants all
tensors in memory at once (an export streams them), gives no hash (a checkpoint would be read again), reports a full
disk without an errno, and makes files that only their owner may read. The format, byte by byte:

======== ============================================================================================================
8 bytes  n, the length of the header, unsigned, little-endian
n bytes  JSON ``{"__metadata__": {"format": "pt"}, NAME: {"dtype": "F32", "shape": […], "data_offsets": [begin, end]},
         …}``, padded with spaces to a multiple of 8; the dtype of bf16 is ``"BF16"``
the rest the tensors, row by row, little-endian, without gaps; ``data_offsets`` count from here
======== ============================================================================================================

Source: https://huggingface.co/docs/safetensors, safetensors 0.8.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import orjson
import torch
from torch import Tensor

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_CHUNK_BYTES = 8 * 2**20
"""Small enough to be still in the processor's cache when it is written after it was hashed."""
_SEND_BYTES = 128 * 2**20
"""Sent to the disk at a time while writing continues, so that little is left to wait for at the end."""


class TensorWriter:
    """Writer of one file, tensor after tensor in the announced order; a context manager.

    Writing and hashing release the interpreter's lock, so that a thread can do both while training continues. The file
    may be read by whoever may read its folder.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        digest: Callable[[memoryview], None] | None = None,
    ):
        """Announce names and shapes of all tensors, in order; `digest` is called with every byte of the file."""
        self._path, self._dtype, self._digest = path, dtype, digest
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._remaining = list(self._shapes)
        self._sent = self._written = 0

    def __enter__(self) -> TensorWriter:
        # Unbuffered: a full disk must be reported by the write, not when the file is closed.
        self._file = open(self._path, "wb", buffering=0)
        with suppress(OSError):  # a file system without permissions
            os.fchmod(self._file.fileno(), self._path.parent.stat().st_mode & 0o666)
        self._put(memoryview(header(self._shapes, self._dtype)))
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, cast to the file's dtype. An OSError, of a full disk or another, names the file."""
        expected = self._remaining.pop(0)
        assert (name, tuple(tensor.shape)) == (expected, self._shapes[expected]), f"{name} came, {expected} is next"
        rows = tensor.detach().to("cpu", self._dtype).contiguous()
        # As bytes: Python's buffers do not know bf16.
        self._put(rows.view(-1).view(torch.uint8).numpy().data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            assert not self._remaining, f"no tensor came for {self._remaining}"
        self._file.close()

    def _put(self, content: memoryview) -> None:
        for begin in range(0, len(content), _CHUNK_BYTES):
            chunk = content[begin : begin + _CHUNK_BYTES]
            if self._digest is not None:
                self._digest(chunk)
            try:
                while chunk:
                    count = os.write(self._file.fileno(), chunk)
                    chunk, self._written = chunk[count:], self._written + count
            except OSError as error:
                error.filename = str(self._path)
                self._file.close()
                raise
            if (unsent := self._written - self._sent) >= _SEND_BYTES:
                # Begins to write it; the kernel keeps in memory what is not on the disk yet.
                os.posix_fadvise(self._file.fileno(), self._sent, unsent, os.POSIX_FADV_DONTNEED)
                self._sent = self._written


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write fp32 tensors that are in memory, as `TensorWriter`; return the file's SHA-256 in hexadecimal."""
    digest, shapes = hashlib.sha256(), {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with TensorWriter(path, shapes, torch.float32, digest.update) as writer:
        for name, tensor in tensors.items():
            assert tensor.dtype == torch.float32, f"{name} is {tensor.dtype}"
            writer.write(name, tensor)
    return digest.hexdigest()


def header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """Length and JSON at the start of a file with tensors in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
    text = orjson.dumps(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
