"""The mixture-of-experts family with chosen MoE layers ↔ ``Qwen3MoeForCausalLM`` (transformers 5.23).

Qwen3's rules, with experts in the MoE layers; the others are listed in ``mlp_only_layers``. Files hold one tensor for
each matrix of each expert, as those of the original model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zerokara.huggingface import qwen3
from zerokara.huggingface.transforms import EXPERTS, EXPERTS_GATE_AND_UP
from zerokara.huggingface.weight_rules import WeightRule
from zerokara.model.shapes import ModelShape

CLASS_NAME = "Qwen3MoeForCausalLM"
_OURS, _HF = "decoder.layers.{i}.mlp.", "model.layers.{i}.mlp."

RULES = (
    *(replace(rule, layers="dense") if ".mlp." in rule.ours else rule for rule in qwen3.RULES),
    WeightRule(_OURS + "router.weight", (_HF + "gate.weight",), layers="sparse"),
    WeightRule(
        _OURS + "experts_fc1.weight",
        (_HF + "experts.{e}.gate_proj.weight", _HF + "experts.{e}.up_proj.weight"),
        EXPERTS_GATE_AND_UP,
        layers="sparse",
    ),
    WeightRule(_OURS + "experts_fc2.weight", (_HF + "experts.{e}.down_proj.weight",), EXPERTS, layers="sparse"),
)

SETTINGS = {
    **qwen3.SETTINGS,
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
}
"""Keys of ``Qwen3MoeConfig`` and of config.yaml."""
OLDER_NAMES = {**qwen3.OLDER_NAMES, "num_local_experts": "num_experts"}
"""transformers 4 reads the second name only, and without it builds 128 experts."""


def config_values(shape: ModelShape) -> dict[str, Any]:
    """The arguments of ``Qwen3MoeConfig``."""
    return {
        **qwen3.config_values(shape),
        "moe_intermediate_size": shape.moe_ffn_hidden_size,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "norm_topk_prob": shape.experts_per_token > 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(shape.num_layers) if layer not in shape.moe_layers],
    }


def moe_layers(config: Any) -> tuple[int, ...]:
    """The layers with experts of a ``Qwen3MoeConfig``."""
    step = config.decoder_sparse_step
    listed = config.mlp_only_layers or []
    return tuple(n for n in range(config.num_hidden_layers) if n not in listed and (n + 1) % step == 0)
