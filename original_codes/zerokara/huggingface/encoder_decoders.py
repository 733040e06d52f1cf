"""T5 version 1.1 ↔ ``T5ForConditionalGeneration``, and with experts ↔ ``SwitchTransformersForConditionalGeneration``
(transformers 5.23).

RMSNorm, gated tanh GELU (``gelu_new``; Switch has no gate), no biases, unscaled attention scores, one relative position
bias in the first layer of each stack. Hugging Face keeps one embedding under three names, of which the file needs one.

transformers takes ``tie_word_embeddings`` of a T5 as whether hidden states are scaled down before the output matrix
(``scale_decoder_outputs``), and then sets it to true; whether the matrix is tied follows from the tensors in the file.
So config.json states the truth, and `config_is_tied` reads the scaling of the loaded configuration.

Switch's class has only a number of sparse layers, and puts them at 1, 1 + n, 1 + 2n, ….
"""

from __future__ import annotations

from typing import Any

from zerokara.huggingface.weight_rules import (
    EXPERTS,
    GATE_AND_UP,
    KEY_VALUE,
    QUERY_KEY_VALUE,
    VOCABULARY,
    Family,
    Transform,
    WeightRule,
)
from zerokara.model.shapes import ModelShape

_CROSS_ATTENTION = "decoder.layers.{i}.cross_attention"


def _attention(ours: str, hf: str, name: str, letters: str, transform: Transform) -> tuple[WeightRule, ...]:
    """Input projections of an attention, which are one matrix of ours, and its output projection."""
    return (
        WeightRule(f"{ours}.{name}.weight", tuple(f"{hf}.{letter}.weight" for letter in letters), transform),
        WeightRule(f"{ours}.linear_proj.weight", (f"{hf}.o.weight",)),
    )


def _feed_forward(ours: str, hf: str) -> tuple[WeightRule, ...]:
    gate_and_up = (f"{hf}.DenseReluDense.wi_0.weight", f"{hf}.DenseReluDense.wi_1.weight")
    return (
        WeightRule(f"{ours}.pre_mlp_layernorm.weight", (f"{hf}.layer_norm.weight",)),
        WeightRule(f"{ours}.mlp.linear_fc1.weight", gate_and_up, GATE_AND_UP),
        WeightRule(f"{ours}.mlp.linear_fc2.weight", (f"{hf}.DenseReluDense.wo.weight",)),
    )


def _stack(name: str) -> tuple[WeightRule, ...]:
    ours, hf = f"{name}.layers.{{i}}", f"{name}.block.{{i}}.layer"
    return (
        WeightRule(
            f"{name}_relative_pos_emb.relative_attention_bias.weight",
            (f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
        ),
        WeightRule(f"{ours}.input_layernorm.weight", (f"{hf}.0.layer_norm.weight",)),
        *_attention(f"{ours}.self_attention", f"{hf}.0.SelfAttention", "linear_qkv", "qkv", QUERY_KEY_VALUE),
        WeightRule(f"{name}.final_layernorm.weight", (f"{name}.final_layer_norm.weight",)),
    )


def _t5_values(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_decoder_layers": shape.num_layers,
        # Ours are trained without dropout; 0 here, so that further training starts from the same arithmetic.
        "dropout_rate": 0.0,
        "initializer_factor": 1.0,
        "feed_forward_proj": "gated-gelu",
    }


T5 = Family(
    model_type="t5",
    class_name="T5ForConditionalGeneration",
    is_encoder_decoder=True,
    rules=(
        WeightRule("embedding.word_embeddings.weight", ("shared.weight",), VOCABULARY),
        *_stack("encoder"),
        *_feed_forward("encoder.layers.{i}", "encoder.block.{i}.layer.1"),
        *_stack("decoder"),
        WeightRule(
            "decoder.layers.{i}.pre_cross_attn_layernorm.weight", ("decoder.block.{i}.layer.1.layer_norm.weight",)
        ),
        WeightRule(f"{_CROSS_ATTENTION}.linear_q.weight", ("decoder.block.{i}.layer.1.EncDecAttention.q.weight",)),
        *_attention(_CROSS_ATTENTION, "decoder.block.{i}.layer.1.EncDecAttention", "linear_kv", "kv", KEY_VALUE),
        *_feed_forward("decoder.layers.{i}", "decoder.block.{i}.layer.2"),
    ),
    settings={
        "d_model": "hidden_size",
        "d_kv": "head_dim",
        "d_ff": "ffn_hidden_size",
        "num_layers": "num_layers",
        "num_heads": "num_attn_heads",
        "relative_attention_num_buckets": "relative_attention_num_buckets",
        "relative_attention_max_distance": "relative_attention_max_distance",
        "layer_norm_epsilon": "norm_epsilon",
    },
    fixed_values=_t5_values,
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    config_is_tied=lambda config: bool(config.scale_decoder_outputs),
)


def _switch_feed_forward(ours: str, hf: str) -> tuple[WeightRule, ...]:
    expert = f"{hf}.mlp.experts.expert_{{e}}"
    return (
        WeightRule(f"{ours}.pre_mlp_layernorm.weight", (f"{hf}.layer_norm.weight",)),
        WeightRule(f"{ours}.mlp.linear_fc1.weight", (f"{hf}.mlp.wi.weight",), layers="dense"),
        WeightRule(f"{ours}.mlp.linear_fc2.weight", (f"{hf}.mlp.wo.weight",), layers="dense"),
        WeightRule(f"{ours}.mlp.router.weight", (f"{hf}.mlp.router.classifier.weight",), layers="sparse"),
        WeightRule(f"{ours}.mlp.experts_fc1.weight", (f"{expert}.wi.weight",), EXPERTS, layers="sparse"),
        WeightRule(f"{ours}.mlp.experts_fc2.weight", (f"{expert}.wo.weight",), EXPERTS, layers="sparse"),
    )


def _switch_values(shape: ModelShape) -> dict[str, Any]:
    return {
        **{key: value for key, value in _t5_values(shape).items() if key != "feed_forward_proj"},
        "dense_act_fn": "gelu_new",
        "num_sparse_encoder_layers": len(shape.moe_layers),
        "num_sparse_decoder_layers": len(shape.moe_layers),
        "expert_capacity": 1 << 20,  # so high that no token is dropped
        "router_bias": False,
        "router_jitter_noise": 0.0,
        "router_dtype": "float32",
    }


def _switch_moe_layers(config: Any) -> tuple[int, ...]:
    if not config.num_sparse_encoder_layers:
        return ()
    step = config.num_layers // config.num_sparse_encoder_layers
    return tuple(layer for layer in range(config.num_layers) if step == 1 or layer % step == 1)


SWITCH = Family(
    model_type="switch_transformers",
    class_name="SwitchTransformersForConditionalGeneration",
    is_encoder_decoder=True,
    rules=(
        *(rule for rule in T5.rules if "mlp" not in rule.ours),
        *_switch_feed_forward("encoder.layers.{i}", "encoder.block.{i}.layer.1"),
        *_switch_feed_forward("decoder.layers.{i}", "decoder.block.{i}.layer.2"),
    ),
    settings={**T5.settings, "num_experts": "num_experts"},
    fixed_values=_switch_values,
    copies=T5.copies,
    stores_copies=True,
    moe_layers=_switch_moe_layers,
)
