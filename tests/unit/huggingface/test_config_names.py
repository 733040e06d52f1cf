"""config.json says each value under its older name too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zerokara.huggingface import config_names, families
from zerokara.model.shapes import ModelShape

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
    shape = replace(LLAMA, architecture=architecture, **experts)
    config = families.hf_config(shape, families.SpecialIds(1, 2, 3), "bf16")
    config.save_pretrained(tmp_path)
    before = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    after = config_names.with_older_names(before, families.FAMILIES[architecture].older_names)
    added = {"torch_dtype": "bfloat16", **OLDER[architecture]}
    assert after == before | added
    assert not before.keys() & added.keys(), "transformers writes them itself by now: the table can lose a line"


def test_a_newer_name_that_is_gone_is_an_error() -> None:
    with pytest.raises(KeyError, match="rope_theta"):
        config_names.with_older_names({"dtype": "float32", "rope_parameters": {}}, {"rope_parameters.rope_theta": "x"})
