"""Weights → safetensors files as Hugging Face reads them: ``model.safetensors``, or shards and their index.

Tensors come one by one and leave memory with their shard, so the writing needs no more than `max_shard_size` besides
what the reader maps from disk. File format: https://huggingface.co/docs/safetensors; the index is JSON with
``metadata.total_size`` (bytes) and ``weight_map`` (tensor name → file).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import constants, split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor

from zerokara.durable import write_json
from zerokara.progress import Progress


def write(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    max_shard_size: str,
) -> list[Path]:
    """Write all `tensors`, rounded to `dtype`, and give the files; `shapes` are those that will come."""
    names: list[str] = []
    plan = _Plan(shapes, dtype, max_shard_size)
    waiting: dict[str, dict[str, Tensor]] = {file: {} for file in plan.names}
    total = sum(plan.bytes_of(name) for name in shapes)
    with Progress("writing weights", total, unit="B") as progress:
        for name, tensor in tensors:
            file = plan.file_of[name]
            waiting[file][name] = tensor.to(dtype).contiguous()
            names.append(name)
            if waiting[file].keys() == plan.names[file]:
                save_file(waiting.pop(file), folder / file, metadata={"format": "pt"})
                # safetensors 0.8 lets only the owner read; a model is as open as the folder that it lies in.
                (folder / file).chmod(folder.stat().st_mode & 0o666)
                progress.advance(sum(plan.bytes_of(written) for written in plan.names[file]))
    assert not waiting, f"no tensor came for {sorted(waiting)}"
    files = [folder / file for file in plan.names]
    if len(files) > 1:
        index = folder / constants.SAFETENSORS_INDEX_FILE
        weight_map = {name: plan.file_of[name] for name in sorted(names)}
        write_json(index, {"metadata": {"total_size": total}, "weight_map": weight_map})
        files.append(index)
    return files


class _Plan:
    """Which tensor goes into which file."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_shard_size: str):
        self._bytes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}
        split = split_state_dict_into_shards_factory(
            dict(self._bytes),
            get_storage_size=lambda size: size,
            filename_pattern=constants.SAFETENSORS_WEIGHTS_FILE_PATTERN,
            max_shard_size=max_shard_size,
        )
        self.names = {file: set(names) for file, names in split.filename_to_tensors.items()}
        self.file_of = split.tensor_to_filename

    def bytes_of(self, name: str) -> int:
        return self._bytes[name]
