"""The GPT-2-like family ↔ ``GPT2LMHeadModel`` (transformers 5.23).

LayerNorm, learned positions, tanh GELU (``gelu_new``), biases everywhere. Hugging Face's GPT-2 keeps its matrices in
``Conv1D`` layers, that is transposed.
"""

from __future__ import annotations

from typing import Any

from zerokara.huggingface.weight_rules import (
    JOINED_QUERY_KEY_VALUE,
    SAME,
    TRANSPOSED,
    VOCABULARY,
    Family,
    Transform,
    WeightRule,
)
from zerokara.model.shapes import ModelShape

_OURS, _HF = "decoder.layers.{i}.", "transformer.h.{i}."


def _weight_and_bias(
    ours: str, hf: str, weight: Transform = SAME, bias: Transform = SAME
) -> tuple[WeightRule, WeightRule]:
    return WeightRule(f"{ours}.weight", (f"{hf}.weight",), weight), WeightRule(f"{ours}.bias", (f"{hf}.bias",), bias)


def _config_values(shape: ModelShape) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        # Ours are trained without dropout; 0 here, so that further training starts from the same arithmetic.
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": shape.init_std,
    }


GPT2 = Family(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    description="GPT-2-like: LayerNorm, GELU, learned positions",
    rules=(
        WeightRule("embedding.word_embeddings.weight", ("transformer.wte.weight",), VOCABULARY),
        WeightRule("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
        *_weight_and_bias(_OURS + "input_layernorm", _HF + "ln_1"),
        *_weight_and_bias(
            _OURS + "self_attention.linear_qkv", _HF + "attn.c_attn", JOINED_QUERY_KEY_VALUE, JOINED_QUERY_KEY_VALUE
        ),
        *_weight_and_bias(_OURS + "self_attention.linear_proj", _HF + "attn.c_proj", TRANSPOSED),
        *_weight_and_bias(_OURS + "pre_mlp_layernorm", _HF + "ln_2"),
        *_weight_and_bias(_OURS + "mlp.linear_fc1", _HF + "mlp.c_fc", TRANSPOSED),
        *_weight_and_bias(_OURS + "mlp.linear_fc2", _HF + "mlp.c_proj", TRANSPOSED),
        *_weight_and_bias("decoder.final_layernorm", "transformer.ln_f"),
    ),
    settings={
        "n_positions": "seq_len",
        "n_embd": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_attn_heads",
        "n_inner": "ffn_hidden_size",
        "layer_norm_epsilon": "norm_epsilon",
    },
    fixed_values=_config_values,
    older_names={"n_positions": "n_ctx"},  # the context length as llama.cpp and the first transformers call it
)
