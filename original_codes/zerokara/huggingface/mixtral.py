"""The mixture-of-experts family ↔ ``MixtralForCausalLM`` (transformers 5.23): Llama's rules, and experts in each layer.

Files hold one tensor for each matrix of each expert, as those of the original model: transformers and other clients
stack them when they load them.
"""

from __future__ import annotations

from typing import Any

from zerokara.huggingface import llama
from zerokara.huggingface.transforms import EXPERTS, EXPERTS_GATE_AND_UP
from zerokara.huggingface.weight_rules import WeightRule
from zerokara.model.shapes import ModelShape

CLASS_NAME = "MixtralForCausalLM"
_OURS, _HF = "decoder.layers.{i}.mlp.", "model.layers.{i}.block_sparse_moe."

RULES = (
    *(rule for rule in llama.RULES if ".mlp." not in rule.ours),
    WeightRule(_OURS + "router.weight", (_HF + "gate.weight",)),
    WeightRule(
        _OURS + "experts_fc1.weight",
        (_HF + "experts.{e}.w1.weight", _HF + "experts.{e}.w3.weight"),
        EXPERTS_GATE_AND_UP,
    ),
    WeightRule(_OURS + "experts_fc2.weight", (_HF + "experts.{e}.w2.weight",), EXPERTS),
)

SETTINGS = {
    **{key: name for key, name in llama.SETTINGS.items() if key != "intermediate_size"},
    "intermediate_size": "moe_ffn_hidden_size",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
}
"""Keys of ``MixtralConfig`` and of config.yaml."""
OLDER_NAMES = llama.OLDER_NAMES


def config_values(shape: ModelShape) -> dict[str, Any]:
    """The arguments of ``MixtralConfig``."""
    values = llama.config_values(shape)
    for key in ("mlp_bias", "attention_bias"):  # MixtralConfig has no such key
        del values[key]
    return {
        **values,
        "intermediate_size": shape.moe_ffn_hidden_size,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    }
