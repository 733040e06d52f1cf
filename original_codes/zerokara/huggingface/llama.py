"""The Llama-like family ↔ ``LlamaForCausalLM`` (transformers 5.23): weight rules and configuration.

Rotary positions need no rule: megatron-core with ``rotary_interleaved`` off and Hugging Face both rotate the first half
of a head against its second half. RMSNorm, SwiGLU, grouped-query attention, no biases.
"""

from __future__ import annotations

from typing import Any

from zerokara.huggingface.config_names import setting_values
from zerokara.huggingface.transforms import GATE_AND_UP, QUERY_KEY_VALUE, VOCABULARY
from zerokara.huggingface.weight_rules import WeightRule
from zerokara.model.shapes import ModelShape

CLASS_NAME = "LlamaForCausalLM"
_OURS, _HF = "decoder.layers.{i}.", "model.layers.{i}."

RULES = (
    WeightRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCABULARY),
    WeightRule(_OURS + "input_layernorm.weight", (_HF + "input_layernorm.weight",)),
    WeightRule(
        _OURS + "self_attention.linear_qkv.weight",
        (_HF + "self_attn.q_proj.weight", _HF + "self_attn.k_proj.weight", _HF + "self_attn.v_proj.weight"),
        QUERY_KEY_VALUE,
    ),
    WeightRule(_OURS + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",)),
    WeightRule(_OURS + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",)),
    WeightRule(
        _OURS + "mlp.linear_fc1.weight", (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"), GATE_AND_UP
    ),
    WeightRule(_OURS + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",)),
    WeightRule("decoder.final_layernorm.weight", ("model.norm.weight",)),
)


SETTINGS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attn_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "seq_len",
    "rms_norm_eps": "norm_epsilon",
    "rope_parameters.rope_theta": "rope_theta",
}
"""Keys of ``LlamaConfig`` and of config.yaml."""
OLDER_NAMES = {"rope_parameters.rope_theta": "rope_theta"}
"""transformers 4 and llama.cpp read this key, and without it silently take a default (1e4; for Mixtral 1e6)."""


def config_values(shape: ModelShape) -> dict[str, Any]:
    """The arguments of ``LlamaConfig``."""
    return {
        **setting_values(SETTINGS, shape),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "initializer_range": shape.init_std,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(shape.rope_theta)},
        "attention_bias": False,
        "mlp_bias": False,
    }
