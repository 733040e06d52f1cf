"""The names of all weights, here and in Hugging Face (transformers 5.23), family by family.

GPT-2: LayerNorm, learned positions, tanh GELU (``gelu_new``), biases everywhere; Hugging Face keeps its matrices in
``Conv1D`` layers, that is transposed.

Llama and its like: RMSNorm, SwiGLU, grouped-query attention, full attention in all layers. Mistral is a Llama; Qwen2
has biases of queries, keys and values; Qwen3 has QK-norm; SmolLM3 has layers without positions; OLMo 2 has QK-norm over
all heads together, and normalizes the outputs of attention and feed-forward layers, not their inputs. Rotary positions
need no rule: megatron-core with ``rotary_interleaved`` off and Hugging Face both rotate the first half of a head
against its second half. Files hold one tensor for each matrix of each expert, as those of the original models:
transformers and other clients stack them when they load them.

T5 version 1.1: RMSNorm, gated tanh GELU (Switch Transformers, with experts, has no gate), no biases, unscaled attention
scores, one relative position bias in the first layer of each stack. Hugging Face keeps one embedding under three names,
of which the file needs one. transformers takes ``tie_word_embeddings`` of a T5 as whether hidden states are scaled down
before the output matrix (``scale_decoder_outputs``), and then sets it to true; whether the matrix is tied follows from
the tensors in the file. So config.json states the truth, and `config_is_tied` reads the scaling of the loaded
configuration. Switch's class has only a number of sparse layers, and puts them at 1, 1 + n, 1 + 2n, ….
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zerokara.huggingface.weight_rules import (
    EXPERTS,
    EXPERTS_GATE_AND_UP,
    GATE_AND_UP,
    JOINED_QUERY_KEY_VALUE,
    KEY_VALUE,
    QUERY_KEY_VALUE,
    SAME,
    TRANSPOSED,
    VOCABULARY,
    Family,
    Transform,
    WeightRule,
)
from zerokara.model.shapes import ModelShape

_OURS, _GPT2, _HF = "decoder.layers.{i}.", "transformer.h.{i}.", "model.layers.{i}."


def _weight_and_bias(ours: str, hf: str, transform: Transform = SAME) -> tuple[WeightRule, ...]:
    """Rules for a matrix and its bias, which transposing leaves as it is."""
    return tuple(WeightRule(f"{ours}.{name}", (f"{hf}.{name}",), transform) for name in ("weight", "bias"))


GPT2 = Family(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    rules=(
        WeightRule("embedding.word_embeddings.weight", ("transformer.wte.weight",), VOCABULARY),
        WeightRule("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
        *_weight_and_bias(_OURS + "input_layernorm", _GPT2 + "ln_1"),
        *_weight_and_bias(_OURS + "self_attention.linear_qkv", _GPT2 + "attn.c_attn", JOINED_QUERY_KEY_VALUE),
        *_weight_and_bias(_OURS + "self_attention.linear_proj", _GPT2 + "attn.c_proj", TRANSPOSED),
        *_weight_and_bias(_OURS + "pre_mlp_layernorm", _GPT2 + "ln_2"),
        *_weight_and_bias(_OURS + "mlp.linear_fc1", _GPT2 + "mlp.c_fc", TRANSPOSED),
        *_weight_and_bias(_OURS + "mlp.linear_fc2", _GPT2 + "mlp.c_proj", TRANSPOSED),
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
    fixed_values=lambda shape: {
        "activation_function": "gelu_new",
        "initializer_range": shape.init_std,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        # Ours are trained without dropout; 0 here, so that further training starts from the same arithmetic.
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    older_names={"n_positions": "n_ctx"},  # the context length as llama.cpp and the first transformers call it
)


def _llama_values(shape: ModelShape) -> dict[str, Any]:
    rotation = shape.rope_scaling.model_dump(exclude_none=True) if shape.rope_scaling else {"rope_type": "default"}
    return {
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "initializer_range": shape.init_std,
        **{f"rope_parameters.{key}": value for key, value in rotation.items()},
        "rope_parameters.rope_theta": float(shape.rope_theta),
        "attention_bias": False,
        "mlp_bias": False,
    }


def _query_key_value(kind: str) -> WeightRule:
    hf = tuple(f"{_HF}self_attn.{letter}_proj.{kind}" for letter in "qkv")
    return WeightRule(f"{_OURS}self_attention.linear_qkv.{kind}", hf, QUERY_KEY_VALUE)


LLAMA = Family(
    model_type="llama",
    class_name="LlamaForCausalLM",
    rules=(
        WeightRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCABULARY),
        WeightRule(_OURS + "input_layernorm.weight", (_HF + "input_layernorm.weight",)),
        _query_key_value("weight"),
        WeightRule(_OURS + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",)),
        WeightRule(_OURS + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",)),
        WeightRule(
            _OURS + "mlp.linear_fc1.weight",
            (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
            GATE_AND_UP,
        ),
        WeightRule(_OURS + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",)),
        WeightRule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    ),
    settings={
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_attn_heads",
        "num_key_value_heads": "num_kv_heads",
        "max_position_embeddings": "seq_len",
        "rms_norm_eps": "norm_epsilon",
        "rope_parameters.rope_theta": "rope_theta",
    },
    fixed_values=_llama_values,
    # transformers 4 and llama.cpp read this key, and without it silently take a default (1e4; for Mixtral 1e6).
    older_names={"rope_parameters.rope_theta": "rope_theta"},
)


def _as_llama(*unknown: str, **more: Any) -> Callable[[ModelShape], dict[str, Any]]:
    """Values as Llama's, without keys that the configuration class does not know, and with more."""
    return lambda shape: {key: value for key, value in _llama_values(shape).items() if key not in unknown} | more


MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    class_name="MistralForCausalLM",
    fixed_values=_as_llama("attention_bias", "mlp_bias", sliding_window=None),
)

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    rules=(*LLAMA.rules, _query_key_value("bias")),
    fixed_values=_as_llama("attention_bias", "mlp_bias", use_sliding_window=False),
)

_QK_NORM = tuple(
    WeightRule(f"{_OURS}self_attention.{letter}_layernorm.weight", (f"{_HF}self_attn.{letter}_norm.weight",))
    for letter in "qk"
)

QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    rules=(*LLAMA.rules, *_QK_NORM),
    fixed_values=_as_llama("mlp_bias", use_sliding_window=False),
)

SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    fixed_values=lambda shape: {
        **_llama_values(shape),
        "use_sliding_window": False,
        "no_rope_layers": [int(shape.traits.rotates(layer)) for layer in range(shape.num_layers)],
    },
)

OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    rules=(
        *(rule for rule in LLAMA.rules if "input_layernorm" not in rule.ours and "pre_mlp" not in rule.ours),
        *_QK_NORM,
        WeightRule(
            _OURS + "self_attention.linear_proj.output_layernorm.weight", (_HF + "post_attention_layernorm.weight",)
        ),
        WeightRule(_OURS + "mlp.linear_fc2.output_layernorm.weight", (_HF + "post_feedforward_layernorm.weight",)),
    ),
    fixed_values=_as_llama("mlp_bias"),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    """Rules for router and experts, by the class's names of their module and matrices."""
    expert = f"{_HF}{block}.experts.{{e}}"
    gates_and_ups = (f"{expert}.{gate}.weight", f"{expert}.{up}.weight")
    return (
        WeightRule(_OURS + "mlp.router.weight", (f"{_HF}{block}.gate.weight",), layers="sparse"),
        WeightRule(_OURS + "mlp.experts_fc1.weight", gates_and_ups, EXPERTS_GATE_AND_UP, "sparse"),
        WeightRule(_OURS + "mlp.experts_fc2.weight", (f"{expert}.{down}.weight",), EXPERTS, "sparse"),
    )


MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    rules=(
        *(rule for rule in LLAMA.rules if ".mlp." not in rule.ours),
        *_experts("block_sparse_moe", "w1", "w3", "w2"),
    ),
    settings={
        **LLAMA.settings,
        "intermediate_size": "moe_ffn_hidden_size",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
    },
    fixed_values=_as_llama("attention_bias", "mlp_bias", sliding_window=None, router_jitter_noise=0.0),
)


def _qwen3_moe_layers(config: Any) -> tuple[int, ...]:
    step = config.decoder_sparse_step
    listed = config.mlp_only_layers or []
    return tuple(n for n in range(config.num_hidden_layers) if n not in listed and (n + 1) % step == 0)


QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    rules=(
        *(replace(rule, layers="dense") if ".mlp." in rule.ours else rule for rule in QWEN3.rules),
        *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    settings={
        **QWEN3.settings,
        "moe_intermediate_size": "moe_ffn_hidden_size",
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
    },
    fixed_values=lambda shape: {
        **QWEN3.fixed_values(shape),
        "norm_topk_prob": shape.experts_per_token > 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(shape.num_layers) if layer not in shape.moe_layers],
    },
    # transformers 4 reads the second name of this key only, and without it builds 128 experts.
    older_names={**QWEN3.older_names, "num_local_experts": "num_experts"},
    moe_layers=_qwen3_moe_layers,
)


def _attention(ours: str, hf: str, name: str, letters: str, transform: Transform) -> tuple[WeightRule, ...]:
    """Input projections of an attention, which are one matrix of ours, and its output projection."""
    return (
        WeightRule(f"{ours}.{name}.weight", tuple(f"{hf}.{letter}.weight" for letter in letters), transform),
        WeightRule(f"{ours}.linear_proj.weight", (f"{hf}.o.weight",)),
    )


def _stack(name: str) -> tuple[WeightRule, ...]:
    """Rules for the encoder or the decoder, its feed-forward layers with a gate."""
    ours, hf, across = f"{name}.layers.{{i}}", f"{name}.block.{{i}}.layer", tuple[WeightRule, ...]()
    table = "relative_attention_bias.weight"
    if name == "decoder":
        across = (
            WeightRule(f"{ours}.pre_cross_attn_layernorm.weight", (f"{hf}.1.layer_norm.weight",)),
            WeightRule(f"{ours}.cross_attention.linear_q.weight", (f"{hf}.1.EncDecAttention.q.weight",)),
            *_attention(f"{ours}.cross_attention", f"{hf}.1.EncDecAttention", "linear_kv", "kv", KEY_VALUE),
        )
    last = f"{hf}.{2 if across else 1}"
    gate_and_up = (f"{last}.DenseReluDense.wi_0.weight", f"{last}.DenseReluDense.wi_1.weight")
    return (
        WeightRule(f"{name}_relative_pos_emb.{table}", (f"{name}.block.0.layer.0.SelfAttention.{table}",)),
        WeightRule(f"{ours}.input_layernorm.weight", (f"{hf}.0.layer_norm.weight",)),
        *_attention(f"{ours}.self_attention", f"{hf}.0.SelfAttention", "linear_qkv", "qkv", QUERY_KEY_VALUE),
        *across,
        WeightRule(f"{ours}.pre_mlp_layernorm.weight", (f"{last}.layer_norm.weight",)),
        WeightRule(f"{ours}.mlp.linear_fc1.weight", gate_and_up, GATE_AND_UP),
        WeightRule(f"{ours}.mlp.linear_fc2.weight", (f"{last}.DenseReluDense.wo.weight",)),
        WeightRule(f"{name}.final_layernorm.weight", (f"{name}.final_layer_norm.weight",)),
    )


T5 = Family(
    model_type="t5",
    class_name="T5ForConditionalGeneration",
    is_encoder_decoder=True,
    rules=(
        WeightRule("embedding.word_embeddings.weight", ("shared.weight",), VOCABULARY),
        *_stack("encoder"),
        *_stack("decoder"),
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
    fixed_values=lambda shape: {
        "num_decoder_layers": shape.num_layers,
        # Ours are trained without dropout; 0 here, so that further training starts from the same arithmetic.
        "dropout_rate": 0.0,
        "initializer_factor": 1.0,
        "feed_forward_proj": "gated-gelu",
    },
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
    fixed_values=lambda shape: {
        **{key: value for key, value in T5.fixed_values(shape).items() if key != "feed_forward_proj"},
        "dense_act_fn": "gelu_new",
        "num_sparse_encoder_layers": len(shape.moe_layers),
        "num_sparse_decoder_layers": len(shape.moe_layers),
        "expert_capacity": 1 << 20,  # so high that no token is dropped
        "router_bias": False,
        "router_jitter_noise": 0.0,
        "router_dtype": "float32",
    },
    copies=T5.copies,
    stores_copies=True,
    moe_layers=_switch_moe_layers,
)

_NAMED_ALIKE = LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, OLMO2, GPT2, MIXTRAL, QWEN3_MOE, T5
FAMILIES = {family.model_type: family for family in _NAMED_ALIKE} | {"switch": SWITCH}
"""Families by our names of the architectures; all but `switch` are named as in transformers."""
