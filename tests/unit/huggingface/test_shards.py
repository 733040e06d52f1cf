"""Weights on disk: one file, or shards with their index, rounded to the format asked for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from zerokara.huggingface import shards

TENSORS = {name: torch.full((10, 10), float(i) + 1 / 3) for i, name in enumerate("abcde")}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def test_one_file_has_no_index(tmp_path: Path) -> None:
    files = shards.write(tmp_path, TENSORS.items(), SHAPES, torch.float32, "1MB")
    assert [file.name for file in files] == ["model.safetensors"]
    loaded = load_file(files[0])
    assert loaded.keys() == TENSORS.keys() and all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    with safe_open(files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_keep_to_the_limit_and_the_index_names_each_tensor_once(tmp_path: Path) -> None:
    # 200 bytes each: two to a file, and the last alone.
    files = shards.write(tmp_path, TENSORS.items(), SHAPES, torch.bfloat16, "0.5KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert [file.name for file in files][-1] == "model.safetensors.index.json"
    assert len(files) == 4 and index["metadata"]["total_size"] == 5 * 100 * 2
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name].bfloat16())
    assert index["weight_map"].keys() == TENSORS.keys()


def test_others_may_read_the_file_if_they_may_read_the_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (file,) = shards.write(tmp_path, TENSORS.items(), SHAPES, torch.float32, "1MB")
    assert file.stat().st_mode & 0o777 == 0o644
