"""config.json says each value under its older name too; weights are one file, or shards and their index."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from zerokara.config.model import RopeScaling
from zerokara.huggingface import families, to_hf
from zerokara.model.shapes import ModelShape

TENSORS = {name: torch.full((10, 10), float(i) + 1 / 3) for i, name in enumerate("abcde")}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
LLAMA = ModelShape("llama", 2, 48, 6, 3, 80, 64, 201, True, 5000.0, 1e-5, 0.02)
EXPERTS = {"num_experts": 5, "experts_per_token": 2, "moe_ffn_hidden_size": 40, "moe_layers": (0, 1)}
OLDER = {
    "llama": {"rope_theta": 5000.0},
    "qwen3": {"rope_theta": 5000.0},
    "mixtral": {"rope_theta": 5000.0},
    "qwen3_moe": {"rope_theta": 5000.0, "num_experts": 5},
    "gpt2": {"n_ctx": 64},
}


@pytest.mark.parametrize("architecture", OLDER)
def test_older_names_stand_beside_the_newer(tmp_path: Path, architecture: str) -> None:
    experts = EXPERTS if architecture in ("mixtral", "qwen3_moe") else {}
    scaling = RopeScaling(rope_type="linear", factor=2) if architecture == "qwen3" else None
    shape = replace(LLAMA, architecture=architecture, rope_scaling=scaling, **experts)
    config = families.hf_config(shape, families.SpecialIds(1, 2, 3), "bf16")
    config.save_pretrained(tmp_path)
    before = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    after = to_hf.with_older_names(before, families.FAMILIES[architecture].older_names)
    added = {"torch_dtype": "bfloat16", **OLDER[architecture]}
    if architecture == "qwen3":
        added["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    assert after == before | added
    assert not before.keys() & added.keys(), "transformers writes them itself by now: the table can lose a line"
    with pytest.raises(KeyError, match="gone"):
        to_hf.with_older_names(before, {"gone": "x"})


def test_one_file_has_no_index_and_may_be_read_by_whoever_may_read_the_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (file,) = to_hf.write_weights(tmp_path, TENSORS.items(), SHAPES, torch.float32, "1MB")
    assert file.name == "model.safetensors" and file.stat().st_mode & 0o777 == 0o644
    loaded = load_file(file)
    assert loaded.keys() == TENSORS.keys() and all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_shards_keep_to_the_limit_and_the_index_names_each_tensor_once(tmp_path: Path) -> None:
    # 200 bytes each: two to a file, and the last alone.
    files = to_hf.write_weights(tmp_path, TENSORS.items(), SHAPES, torch.bfloat16, "0.5KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert [file.name for file in files][-1] == "model.safetensors.index.json"
    assert len(files) == 4 and index["metadata"]["total_size"] == 5 * 100 * 2
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name].bfloat16())
    assert index["weight_map"].keys() == TENSORS.keys()
