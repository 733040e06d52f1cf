"""The T5 family, version 1.1 ↔ ``T5ForConditionalGeneration`` (transformers 5.23): weight rules and configuration.

RMSNorm, gated tanh GELU (``gelu_new``), no biases, unscaled attention scores, one relative position bias in the first
layer of each stack. Hugging Face keeps one embedding under three names, of which the file needs one.

transformers takes ``tie_word_embeddings`` of a T5 as whether hidden states are scaled down before the output matrix
(``scale_decoder_outputs``), and then sets it to true; whether the matrix is tied follows from the tensors in the file.
So config.json states the truth, and `config_is_tied` reads the scaling of the loaded configuration.
"""

from __future__ import annotations

from typing import Any

from zerokara.huggingface.config_names import setting_values
from zerokara.huggingface.transforms import GATE_AND_UP, KEY_VALUE, QUERY_KEY_VALUE, SAME, VOCABULARY, Transform
from zerokara.huggingface.weight_rules import WeightRule
from zerokara.model.shapes import ModelShape

CLASS_NAME = "T5ForConditionalGeneration"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Names under which the class has ``shared.weight`` again."""


def _attention(ours: str, hf: str, inputs: tuple[str, str, Transform]) -> tuple[WeightRule, ...]:
    """The input projections of an attention, which are one matrix of ours, and its output projection."""
    name, letters, transform = inputs
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
        *_attention(f"{ours}.self_attention", f"{hf}.0.SelfAttention", ("linear_qkv", "qkv", QUERY_KEY_VALUE)),
        WeightRule(f"{name}.final_layernorm.weight", (f"{name}.final_layer_norm.weight",)),
    )


_CROSS_ATTENTION = "decoder.layers.{i}.cross_attention"

RULES = (
    WeightRule("embedding.word_embeddings.weight", ("shared.weight",), VOCABULARY),
    *_stack("encoder"),
    *_feed_forward("encoder.layers.{i}", "encoder.block.{i}.layer.1"),
    *_stack("decoder"),
    WeightRule("decoder.layers.{i}.pre_cross_attn_layernorm.weight", ("decoder.block.{i}.layer.1.layer_norm.weight",)),
    WeightRule(f"{_CROSS_ATTENTION}.linear_q.weight", ("decoder.block.{i}.layer.1.EncDecAttention.q.weight",), SAME),
    *_attention(_CROSS_ATTENTION, "decoder.block.{i}.layer.1.EncDecAttention", ("linear_kv", "kv", KEY_VALUE)),
    *_feed_forward("decoder.layers.{i}", "decoder.block.{i}.layer.2"),
)


SETTINGS = {
    "d_model": "hidden_size",
    "d_kv": "head_dim",
    "d_ff": "ffn_hidden_size",
    "num_layers": "num_layers",
    "num_heads": "num_attn_heads",
    "relative_attention_num_buckets": "relative_attention_num_buckets",
    "relative_attention_max_distance": "relative_attention_max_distance",
    "layer_norm_epsilon": "norm_epsilon",
}
"""Keys of ``T5Config`` and of config.yaml."""


def config_values(shape: ModelShape) -> dict[str, Any]:
    """The arguments of ``T5Config``."""
    return {
        **setting_values(SETTINGS, shape),
        "num_decoder_layers": shape.num_layers,
        # Ours are trained without dropout; 0 here, so that further training starts from the same arithmetic.
        "dropout_rate": 0.0,
        "initializer_factor": 1.0,
        "feed_forward_proj": "gated-gelu",
    }


def config_is_tied(config: Any) -> bool:
    """Whether a loaded configuration says that embedding and output matrix are tied."""
    return bool(config.scale_decoder_outputs)
