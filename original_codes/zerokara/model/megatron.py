"""The one place that builds a megatron-core model (0.16.1): what it is told of each family, and what its layers are.

megatron-core deprecates `GPTModel` from 0.19 on.
"""

from __future__ import annotations

import zerokara.model.import_megatron  # noqa: F401  # before megatron-core

# isort: split
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import (
    CrossAttention,
    CrossAttentionSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.nn.functional import gelu, silu

from zerokara.model import cpu, initial_weights, parallel, recomputation
from zerokara.model.attention import FusedAttention
from zerokara.model.auxiliary import Auxiliary
from zerokara.model.decoder import Decoder
from zerokara.model.encoder_decoder import EncoderDecoder
from zerokara.model.experts import Experts, Routing, experts_of
from zerokara.model.linear import ColumnLinear, RowLinear
from zerokara.model.qk_norm import HeadNorm
from zerokara.model.shapes import ModelShape
from zerokara.model.sharding import Sharding

Model = Decoder | EncoderDecoder


def build(
    shape: ModelShape,
    dtype: torch.dtype = torch.float32,
    seed: int | None = 0,
    activation_checkpointing: str = "off",
    routing: Routing = Routing(),  # noqa: B008  # it cannot change
) -> Model:
    """Build this process's part of a model on the CPU, with the initial weights of `seed`; None leaves them undefined.

    The weights are drawn in fp32 and rounded to `dtype` afterwards, so the same seed gives the same model everywhere.
    What the backward pass computes again (`recomputation`) changes no result. `routing` tells how the routers of sparse
    layers are trained. `parallel.start` must have been called.
    """
    cpu.prepare()
    config = _FAMILIES[shape.architecture](shape)
    if shape.moe_layers:
        _add_experts(config, shape, routing)
    model = _encoder_decoder(shape, config) if shape.traits.is_encoder_decoder else _decoder(shape, config)
    model.shape, model.sharding = shape, Sharding.of(shape)
    if shape.moe_layers:
        model.auxiliary = Auxiliary()
        for experts in experts_of(model.all_layers()):
            experts.shared = model.auxiliary
    for name, parameter in model.named_parameters():
        # What DeepSpeed goes by to count a replicated parameter once in the norm of the gradient (runtime/utils.py,
        # is_model_parallel_parameter); megatron-core marks only what it draws itself.
        parameter.tensor_model_parallel = not model.sharding.is_replicated(name)
    if seed is not None:
        initial_weights.draw(model, shape, seed)
    recomputation.apply(model.all_layers(), activation_checkpointing)
    return model.to(dtype)


def num_parameters(model: Model) -> int:
    """The numbers of the whole model of which this process holds a part."""
    return sum(model.sharding.whole_shape(name, part.shape).numel() for name, part in model.named_parameters())


def _decoder(shape: ModelShape, config: TransformerConfig) -> Decoder:
    return Decoder(
        config=config,
        transformer_layer_spec=_block_spec(shape, causal=True),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.seq_len,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="learned_absolute" if shape.traits.positions == "learned" else "rope",
        rotary_base=shape.rope_theta,  # declared int, used as float
    )


def _encoder_decoder(shape: ModelShape, config: TransformerConfig) -> EncoderDecoder:
    model = EncoderDecoder(
        config=config,
        encoder_config=config,
        transformer_encoder_layer_spec=_block_spec(shape, causal=False),
        transformer_decoder_layer_spec=_block_spec(shape, causal=True, looks=True),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.seq_len,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="relative",
        relative_attention_num_buckets=shape.relative_attention_num_buckets,
        relative_attention_max_distance=shape.relative_attention_max_distance,
    )
    model.drop_unused_heads()
    return model


def _common(shape: ModelShape, **family: Any) -> TransformerConfig:
    return TransformerConfig(
        tensor_model_parallel_size=parallel.tensor_size(),
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attn_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        layernorm_epsilon=shape.norm_epsilon,
        init_method_std=shape.init_std,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.float32,
        # These fusions are wrapped in torch.compile (megatron/core/jit.py): they would compile while the run waits.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        # The gradients of the weights belong to DeepSpeed.
        async_tensor_model_parallel_allreduce=False,
        persist_layer_norm=False,
        **family,
    )


tanh_gelu = partial(gelu, approximate="tanh")
"""``gelu_new`` in Hugging Face's GPT-2 and T5."""


def _llama(shape: ModelShape) -> TransformerConfig:
    return _common(shape, normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True, activation_func=silu)


def _qwen3(shape: ModelShape) -> TransformerConfig:
    config = _llama(shape)
    config.qk_layernorm = True
    return config


def _gpt2(shape: ModelShape) -> TransformerConfig:
    return _common(shape, normalization="LayerNorm", add_bias_linear=True, activation_func=tanh_gelu)


def _t5(shape: ModelShape) -> TransformerConfig:
    config = _llama(shape)
    config.activation_func = tanh_gelu
    config.softmax_scale = 1.0  # the initial weights make up for it
    return config


def _switch(shape: ModelShape) -> TransformerConfig:
    config = _t5(shape)
    config.gated_linear_unit = False
    return config


def _add_experts(config: TransformerConfig, shape: ModelShape, routing: Routing) -> None:
    """Tell `Experts` by megatron-core's own names; set afterwards, they change nothing else."""
    config.num_moe_experts, config.moe_router_topk = shape.num_experts, shape.experts_per_token
    config.moe_ffn_hidden_size = shape.moe_ffn_hidden_size
    config.moe_aux_loss_coeff, config.moe_z_loss_coeff = routing.balance, routing.z
    config.moe_expert_capacity_factor = routing.capacity


_FAMILIES: dict[str, Callable[[ModelShape], TransformerConfig]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "mixtral": _llama,
    "qwen3_moe": _qwen3,
    "t5": _t5,
    "switch": _switch,
    "t5_moe": _t5,
}
"""The model builder's table: what megatron-core is told of each family."""


def _block_spec(shape: ModelShape, causal: bool, looks: bool = False) -> TransformerBlockSubmodules:
    """Of a stack of layers; `looks` tells whether they look at an encoder."""
    qk_norm = HeadNorm if shape.traits.qk_norm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal if causal else AttnMaskType.no_mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=FusedAttention,
            linear_proj=RowLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    dense = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear))
    layers = [
        ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm,
                self_attention=attention,
                self_attn_bda=get_bias_dropout_add,
                **(_cross_attention() if looks else {}),
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=Experts if layer in shape.moe_layers else dense,
                mlp_bda=get_bias_dropout_add,
            ),
        )
        for layer in range(shape.num_layers)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)


def _cross_attention() -> dict[str, Any]:
    attention = ModuleSpec(
        module=CrossAttention,
        params={"attn_mask_type": AttnMaskType.no_mask},
        submodules=CrossAttentionSubmodules(
            linear_q=ColumnLinear, linear_kv=ColumnLinear, core_attention=FusedAttention, linear_proj=RowLinear
        ),
    )
    return {
        "pre_cross_attn_layernorm": WrappedTorchNorm,
        "cross_attention": attention,
        "cross_attn_bda": get_bias_dropout_add,
    }
