"""Weights → safetensors files as Hugging Face reads them: ``model.safetensors``, or shards and their index.

Tensors come one by one and go to disk one by one: the writing needs no memory but for the tensor in hand. The index is
JSON with ``metadata.total_size`` (bytes) and ``weight_map`` (tensor name → file).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import constants
from torch import Tensor

from zerokara.checkpoint.tensor_file import TensorWriter, nbytes
from zerokara.durable import BackgroundSync, write_json
from zerokara.progress import Progress

Shapes = Mapping[str, tuple[int, ...]]


def write(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Shapes,
    dtype: torch.dtype,
    max_shard_size: str,
    background_sync: BackgroundSync | None = None,
) -> list[Path]:
    """Write all `tensors`, rounded to `dtype`, and give the files.

    `shapes` are those that will come, in their order. `background_sync` sends to the disk what is written so far.

    Raises:
        OSError: the disk is full, or cannot be written; names the file.
    """
    plan = _plan(shapes, dtype, max_shard_size)
    coming = iter(tensors)
    total = sum(nbytes(shape, dtype) for shape in shapes.values())
    with Progress("writing weights", total, unit="B") as progress:
        for file, inside in plan.items():
            with TensorWriter(folder / file, inside, dtype, background_sync) as writer:
                for expected in inside:
                    name, tensor = next(coming)
                    assert name == expected, f"{name} came where {expected} was announced"
                    writer.write(name, tensor)
                    progress.advance(nbytes(inside[name], dtype))
    files = [folder / file for file in plan]
    if len(files) > 1:
        index = folder / constants.SAFETENSORS_INDEX_FILE
        weight_map = {name: file for file, inside in plan.items() for name in inside}
        write_json(index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
        files.append(index)
    return files


def _plan(shapes: Shapes, dtype: torch.dtype, max_shard_size: str) -> dict[str, Shapes]:
    """File → the shapes in it. A file is full before the next begins, so that tensors can come in their order.

    (huggingface_hub's own split puts a tensor above the limit before those that came earlier.)
    """
    limit = _bytes_of(max_shard_size)
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    room = limit
    for name, shape in shapes.items():
        size = nbytes(shape, dtype)
        if size > room and parts[-1]:
            parts.append({})
            room = limit
        parts[-1][name] = shape
        room -= size
    suffixes = ["" if len(parts) == 1 else f"-{number:05d}-of-{len(parts):05d}" for number in range(1, len(parts) + 1)]
    pattern = constants.SAFETENSORS_WEIGHTS_FILE_PATTERN
    return {pattern.format(suffix=suffix): part for suffix, part in zip(suffixes, parts, strict=True)}


def _bytes_of(size: str) -> int:
    """``4GB`` in bytes, in the decimal units that Hugging Face counts shards in."""
    number, unit = re.fullmatch(r"([0-9.]+)(KB|MB|GB)", size).groups()  # type: ignore[union-attr]
    return int(float(number) * {"KB": 10**3, "MB": 10**6, "GB": 10**9}[unit])
