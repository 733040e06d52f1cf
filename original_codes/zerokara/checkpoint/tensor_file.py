"""One safetensors file of fp32 tensors, written and hashed in one pass.

The library's own writer holds a second copy of every tensor, and whoever wants the hash must read the file again; here
each piece goes to the file and into the hash while it is warm. Both let go of the interpreter, so that a thread can do
it while training goes on. The format, byte by byte:

======== ============================================================================================================
8 bytes  n, the length of the header, unsigned, little-endian
n bytes  JSON ``{"__metadata__": {"format": "pt"}, NAME: {"dtype": "F32", "shape": […], "data_offsets": [begin, end]},
         …}``, filled up with spaces to a multiple of 8
the rest the tensors, row by row, little-endian, without gaps; ``data_offsets`` count from here
======== ============================================================================================================

Source: https://huggingface.co/docs/safetensors, safetensors 0.8.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:  # those who only look for checkpoints need no torch
    from torch import Tensor

_PIECE_BYTES = 8 * 2**20
"""Small enough to be still in the processor's cache when it is written after it was hashed."""


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write contiguous fp32 tensors in main memory; gives the file's SHA-256 in hexadecimal.

    Raises:
        OSError: the disk is full, or cannot be written; names the file.
    """
    digest = hashlib.sha256()
    # Unbuffered: what a full disk refuses must be told by `write`, not when the file is closed.
    with open(path, "wb", buffering=0) as file:
        for content in (memoryview(_header(tensors)), *map(_bytes_of, tensors.values())):
            for begin in range(0, len(content), _PIECE_BYTES):
                piece = content[begin : begin + _PIECE_BYTES]
                digest.update(piece)
                _write_all(file.fileno(), piece, path)
    return digest.hexdigest()


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of the file that `write` makes."""
    return len(_header(tensors)) + sum(tensor.numel() * 4 for tensor in tensors.values())


def _write_all(descriptor: int, piece: memoryview, path: Path) -> None:
    try:
        while piece:
            piece = piece[os.write(descriptor, piece) :]
    except OSError as error:
        error.filename = str(path)
        raise


def _bytes_of(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous() and tensor.element_size() == 4 and tensor.is_floating_point(), tensor.dtype
    return tensor.detach().view(-1).numpy().data.cast("B")


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * 4
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = orjson.dumps(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
