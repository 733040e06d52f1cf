"""Tensors that are mapped from a file, one at a time, as the library wrote them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from zerokara.checkpoint.stored_tensors import StoredTensors

TENSORS = {"b": torch.randn(3, 5), "a": torch.randn(7), "empty": torch.zeros(0, 2), "last": torch.randn(2, 2, 2)}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    large = torch.arange(40_000.0).view(200, 200)  # over several pages, and not from the beginning of one
    all_of_them = {**TENSORS, "large": large}
    save_file(all_of_them, path, metadata={"format": "pt"})
    tensors = StoredTensors([path])
    assert len(tensors) == 5 and tensors.shapes == {name: tuple(tensor.shape) for name, tensor in all_of_them.items()}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in all_of_them.items())
    tensors["large"][0, 0] = 7.0
    assert tensors["large"][0, 0] == 0.0, "a change must not reach the file"


def test_a_tensor_leaves_memory_with_its_last_user(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(100, 100)}, path)

    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")

    tensors = StoredTensors([path])
    assert not mapped()
    part = tensors["w"][5:]
    assert mapped() and float(part.sum()) == 9500
    del part
    assert not mapped()
