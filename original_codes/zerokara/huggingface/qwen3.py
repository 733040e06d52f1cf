"""The Qwen3-like family ↔ ``Qwen3ForCausalLM`` (transformers 5.23): Llama's rules, and QK-norm.

All layers have full attention (no sliding window).
"""

from __future__ import annotations

from typing import Any

from zerokara.huggingface import llama
from zerokara.huggingface.weight_rules import WeightRule
from zerokara.model.shapes import ModelShape

CLASS_NAME = "Qwen3ForCausalLM"

RULES = (
    *llama.RULES,
    *(
        WeightRule(
            f"decoder.layers.{{i}}.self_attention.{kind}_layernorm.weight",
            (f"model.layers.{{i}}.self_attn.{kind}_norm.weight",),
        )
        for kind in "qk"
    ),
)

SETTINGS, OLDER_NAMES = llama.SETTINGS, llama.OLDER_NAMES


def config_values(shape: ModelShape) -> dict[str, Any]:
    """The arguments of ``Qwen3Config``."""
    values = llama.config_values(shape)
    del values["mlp_bias"]  # Qwen3Config has no such key
    return {**values, "use_sliding_window": False}
