"""The Qwen3-like family ↔ ``Qwen3ForCausalLM`` (transformers 5.23): Llama's rules, and a norm of each head's q and k.

All layers see the whole text (``full_attention``).
"""

from __future__ import annotations

from typing import Any

from zerokara.huggingface import llama
from zerokara.huggingface.rules import Rule
from zerokara.model.shapes import ModelShape

CLASS_NAME = "Qwen3ForCausalLM"

RULES = (
    *llama.RULES,
    *(
        Rule(
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
    del values["mlp_bias"]  # it has no such choice
    return {**values, "use_sliding_window": False}
