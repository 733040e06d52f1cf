"""Weights → safetensors files as Hugging Face reads them: ``model.safetensors``, or shards and their index.

Tensors are written one at a time as they come, so that writing needs memory for one tensor only (the library's own
`save_file` takes all tensors of a file at once). The index is JSON with ``metadata.total_size`` (bytes) and
``weight_map`` (tensor name → file).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import constants
from torch import Tensor

from zerokara.checkpoint.tensor_file import TensorWriter, nbytes
from zerokara.durable import write_json
from zerokara.progress import Progress

Shapes = Mapping[str, tuple[int, ...]]


def write(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Shapes,
    dtype: torch.dtype,
    max_shard_size: str,
) -> list[Path]:
    """Write all `tensors`, rounded to `dtype`, and return the files.

    `shapes` announces the tensors in their order.

    Raises:
        OSError: the disk is full, or cannot be written; names the file.
    """
    plan = _plan(shapes, dtype, max_shard_size)
    coming = iter(tensors)
    total = sum(nbytes(shape, dtype) for shape in shapes.values())
    with Progress("writing weights", total, unit="B") as progress:
        for file, inside in plan.items():
            with TensorWriter(folder / file, inside, dtype) as writer:
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
    """File → shapes of the tensors in it. A file is filled before the next is opened, so tensors keep their order.

    (huggingface_hub's own split moves a tensor above the limit before earlier ones.)
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
