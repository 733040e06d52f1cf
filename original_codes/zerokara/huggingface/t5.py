"""The T5 family, version 1.1 ↔ ``T5ForConditionalGeneration`` (transformers 5.23): weight rules and configuration.

RMSNorm, gated tanh GELU (``gelu_new``), no biases, no division of the scores, one table of relative positions in the
first layer of each stack. Hugging Face keeps one embedding under three names, of which the file needs one.

transformers reads ``tie_word_embeddings`` of a T5 in two ways: as whether hidden states are scaled down before the
output matrix (``scale_decoder_outputs``), and then sets it to true itself; whether the matrix is tied follows from what
the file holds. So config.json says what is the case, and the loaded configuration is asked for the scaling.
"""

from __future__ import annotations

from typing import Any

from zerokara.huggingface.rules import Rule
from zerokara.huggingface.transforms import GATE_AND_UP, KEY_VALUE, QUERY_KEY_VALUE, SAME, VOCABULARY, Transform
from zerokara.model.shapes import ModelShape

CLASS_NAME = "T5ForConditionalGeneration"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Names under which the class keeps ``shared.weight`` again."""


def _attention(ours: str, hf: str, inputs: tuple[str, str, Transform]) -> tuple[Rule, ...]:
    """The two matrices of an attention that stand in one of ours, and its way out."""
    name, letters, transform = inputs
    return (
        Rule(f"{ours}.{name}.weight", tuple(f"{hf}.{letter}.weight" for letter in letters), transform),
        Rule(f"{ours}.linear_proj.weight", (f"{hf}.o.weight",)),
    )


def _feed_forward(ours: str, hf: str) -> tuple[Rule, ...]:
    rising = (f"{hf}.DenseReluDense.wi_0.weight", f"{hf}.DenseReluDense.wi_1.weight")
    return (
        Rule(f"{ours}.pre_mlp_layernorm.weight", (f"{hf}.layer_norm.weight",)),
        Rule(f"{ours}.mlp.linear_fc1.weight", rising, GATE_AND_UP),
        Rule(f"{ours}.mlp.linear_fc2.weight", (f"{hf}.DenseReluDense.wo.weight",)),
    )


def _stack(name: str) -> tuple[Rule, ...]:
    ours, hf = f"{name}.layers.{{i}}", f"{name}.block.{{i}}.layer"
    return (
        Rule(
            f"{name}_relative_pos_emb.relative_attention_bias.weight",
            (f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
        ),
        Rule(f"{ours}.input_layernorm.weight", (f"{hf}.0.layer_norm.weight",)),
        *_attention(f"{ours}.self_attention", f"{hf}.0.SelfAttention", ("linear_qkv", "qkv", QUERY_KEY_VALUE)),
        Rule(f"{name}.final_layernorm.weight", (f"{name}.final_layer_norm.weight",)),
    )


_LOOKING = "decoder.layers.{i}.cross_attention"

RULES = (
    Rule("embedding.word_embeddings.weight", ("shared.weight",), VOCABULARY),
    *_stack("encoder"),
    *_feed_forward("encoder.layers.{i}", "encoder.block.{i}.layer.1"),
    *_stack("decoder"),
    Rule("decoder.layers.{i}.pre_cross_attn_layernorm.weight", ("decoder.block.{i}.layer.1.layer_norm.weight",)),
    Rule(f"{_LOOKING}.linear_q.weight", ("decoder.block.{i}.layer.1.EncDecAttention.q.weight",), SAME),
    *_attention(_LOOKING, "decoder.block.{i}.layer.1.EncDecAttention", ("linear_kv", "kv", KEY_VALUE)),
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
        "d_model": shape.hidden_size,
        "d_kv": shape.head_dim,
        "d_ff": shape.ffn_hidden_size,
        "num_layers": shape.num_layers,
        "num_decoder_layers": shape.num_layers,
        "num_heads": shape.num_attn_heads,
        "relative_attention_num_buckets": shape.relative_attention_num_buckets,
        "relative_attention_max_distance": shape.relative_attention_max_distance,
        # Ours are trained without dropout; 0 here, so that whoever goes on training starts from the same arithmetic.
        "dropout_rate": 0.0,
        "layer_norm_epsilon": shape.norm_epsilon,
        "initializer_factor": 1.0,
        "feed_forward_proj": "gated-gelu",
    }


def says_tied(config: Any) -> bool:
    """Whether a loaded configuration says that one matrix reads and predicts."""
    return bool(config.scale_decoder_outputs)
