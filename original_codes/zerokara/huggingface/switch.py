"""T5 with one expert a token ↔ ``SwitchTransformersForConditionalGeneration`` (transformers 5.23).

T5's rules except for the feed-forward layers, which have no gate. The class has only a number of sparse layers, and
puts them at 1, 1 + n, 1 + 2n, …; ``expert_capacity``, the most tokens of a text that an expert takes, is set so high
that none is dropped.
"""

from __future__ import annotations

from typing import Any

from zerokara.huggingface import t5
from zerokara.huggingface.transforms import EXPERTS
from zerokara.huggingface.weight_rules import WeightRule
from zerokara.model.shapes import ModelShape

CLASS_NAME = "SwitchTransformersForConditionalGeneration"
_UNBOUNDED = 1 << 20


def _feed_forward(ours: str, hf: str) -> tuple[WeightRule, ...]:
    return (
        WeightRule(f"{ours}.pre_mlp_layernorm.weight", (f"{hf}.layer_norm.weight",)),
        WeightRule(f"{ours}.mlp.linear_fc1.weight", (f"{hf}.mlp.wi.weight",), layers="dense"),
        WeightRule(f"{ours}.mlp.linear_fc2.weight", (f"{hf}.mlp.wo.weight",), layers="dense"),
        WeightRule(f"{ours}.mlp.router.weight", (f"{hf}.mlp.router.classifier.weight",), layers="sparse"),
        WeightRule(
            f"{ours}.mlp.experts_fc1.weight", (f"{hf}.mlp.experts.expert_{{e}}.wi.weight",), EXPERTS, layers="sparse"
        ),
        WeightRule(
            f"{ours}.mlp.experts_fc2.weight", (f"{hf}.mlp.experts.expert_{{e}}.wo.weight",), EXPERTS, layers="sparse"
        ),
    )


RULES = (
    *(rule for rule in t5.RULES if "mlp" not in rule.ours),
    *_feed_forward("encoder.layers.{i}", "encoder.block.{i}.layer.1"),
    *_feed_forward("decoder.layers.{i}", "decoder.block.{i}.layer.2"),
)

SETTINGS = {**t5.SETTINGS, "num_experts": "num_experts"}
"""Keys of ``SwitchTransformersConfig`` and of config.yaml."""


def config_values(shape: ModelShape) -> dict[str, Any]:
    """The arguments of ``SwitchTransformersConfig``, whose dense layers and experts have the same feed-forward size."""
    values = t5.config_values(shape)
    del values["feed_forward_proj"]
    return {
        **values,
        "dense_act_fn": "gelu_new",
        "num_experts": shape.num_experts,
        "num_sparse_encoder_layers": len(shape.moe_layers),
        "num_sparse_decoder_layers": len(shape.moe_layers),
        "expert_capacity": _UNBOUNDED,
        "router_bias": False,
        "router_jitter_noise": 0.0,
        "router_dtype": "float32",
    }


def moe_layers(config: Any) -> tuple[int, ...]:
    """The layers with experts of a ``SwitchTransformersConfig``."""
    if not config.num_sparse_encoder_layers:
        return ()
    step = config.num_layers // config.num_sparse_encoder_layers
    return tuple(layer for layer in range(config.num_layers) if step == 1 or layer % step == 1)
