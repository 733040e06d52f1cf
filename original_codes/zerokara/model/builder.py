"""The builder of the models from megatron-core's parts (0.16.1): the configuration of each family, and its layers."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from zerokara.config.engine import OptimSettings
from zerokara.model import layers, parallel
from zerokara.model.attention import FusedAttention, QKNorm, UnrotatedAttention
from zerokara.model.dropout import BiasDropoutAdd, Dropout
from zerokara.model.experts import AuxiliaryLoss, MixtureOfExperts, experts_of
from zerokara.model.language_model import Decoder, EncoderDecoder
from zerokara.model.layers import ColumnLinear, FeedForward, Layer, NormedFeedForward, NormedRowLinear, RowLinear
from zerokara.model.megatron_core import (
    AttnMaskType,
    CrossAttention,
    CrossAttentionSubmodules,
    IdentityOp,
    ModuleSpec,
    SelfAttention,
    SelfAttentionSubmodules,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayerSubmodules,
    WrappedTorchNorm,
    get_bias_dropout_add,
)
from zerokara.model.shapes import ModelShape

Model = Decoder | EncoderDecoder


def build(
    shape: ModelShape,
    dtype: torch.dtype = torch.float32,
    activation_checkpointing: str = "off",
    settings: OptimSettings | None = None,
) -> Model:
    """Build this rank's shard of a model on the CPU; its weights are undefined.

    `activation_checkpointing` (`layers`) changes no result. `settings` have dropout, the coefficients of the auxiliary
    losses of MoE layers, and their capacity factor; all are 0 without them. `parallel.start` must have been called.
    """
    config = _config(shape)
    if shape.moe_layers:  # of `MixtureOfExperts`, under megatron-core's names: set afterwards, they change nothing else
        config.num_moe_experts, config.moe_router_topk = shape.num_experts, shape.experts_per_token
        config.moe_ffn_hidden_size = shape.moe_ffn_hidden_size
        if settings:
            config.moe_aux_loss_coeff = settings.router_aux_loss_coef
            config.moe_z_loss_coeff = settings.router_z_loss_coef
            config.moe_expert_capacity_factor = settings.expert_capacity_factor
    dropout = Dropout(settings.dropout, settings.seed) if settings else Dropout(0.0, 0)
    model = _model_of(shape, config, dropout)
    model.dropout = dropout
    model.shape, model.kernels = shape, layers.Kernels()
    layers.embed_without_waits(model.embedding.word_embeddings)
    if shape.moe_layers:
        model.auxiliary = AuxiliaryLoss()
        for experts in experts_of(model.all_layers()):
            experts.auxiliary = model.auxiliary
    for name, parameter in model.named_parameters():
        # DeepSpeed counts a replicated parameter once in the gradient norm by this mark (runtime/utils.py,
        # is_model_parallel_parameter); megatron-core marks only parameters that it initializes itself.
        parameter.tensor_model_parallel = shape.partition(name) is not None
    for layer in model.all_layers():
        layer.recomputes, layer.mlp.kernels = activation_checkpointing, model.kernels
    return model.to(dtype)


def _model_of(shape: ModelShape, config: TransformerConfig, dropout: Dropout) -> Model:
    common: dict[str, Any] = {
        "config": config,
        "vocab_size": shape.padded_vocab_size,
        "max_sequence_length": shape.seq_len,
        "parallel_output": True,
        "share_embeddings_and_output_weights": shape.tie_word_embeddings,
    }
    if not shape.traits.is_encoder_decoder:
        decoder = Decoder(
            **common,
            transformer_layer_spec=_block_spec(shape, dropout, causal=True),
            position_embedding_type="learned_absolute" if shape.traits.positions == "learned" else "rope",
            rotary_base=shape.rope_theta,  # declared int, used as float
        )
        if shape.rope_scaling:
            rotation, (frequencies, decoder.rotation_factor) = decoder.rotary_pos_emb, _scaled_rotation(shape)
            rotation.inv_freq = frequencies.to(rotation.inv_freq.device)
        return decoder
    model = EncoderDecoder(
        **common,
        encoder_config=config,
        transformer_encoder_layer_spec=_block_spec(shape, dropout, causal=False),
        transformer_decoder_layer_spec=_block_spec(shape, dropout, causal=True),
        position_embedding_type="relative",
        relative_attention_num_buckets=shape.relative_attention_num_buckets,
        relative_attention_max_distance=shape.relative_attention_max_distance,
    )
    # The output layers that are not used; megatron-core's tied one would have a bias.
    del model.lm_head
    if shape.tie_word_embeddings:
        del model.output_layer
    return model


def _scaled_rotation(shape: ModelShape) -> tuple[Tensor, float]:
    """Scaled rotary frequencies [E/2], and the factor of rotated queries and of rotated keys: transformers' own, since
    transformers runs what was trained. Linear scaling: Chen et al., 2023, arXiv 2306.15595; YaRN: Peng et al., 2023,
    arXiv 2309.00071."""
    from transformers import LlamaConfig  # half a second to import
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert shape.rope_scaling is not None
    values = shape.rope_scaling.model_dump(exclude_none=True)
    rotation = LlamaConfig(
        head_dim=shape.head_dim,
        max_position_embeddings=shape.seq_len,
        rope_parameters=values | {"rope_theta": shape.rope_theta},
    )
    with torch.device("cpu") as cpu:  # a model that is built without weights has a default of its own
        frequencies, factor = ROPE_INIT_FUNCTIONS[values["rope_type"]](rotation, cpu)
    return frequencies, factor


_ACTIVATIONS = {"silu": silu, "gelu_tanh": partial(gelu, approximate="tanh")}


def _config(shape: ModelShape) -> TransformerConfig:
    traits = shape.traits
    # T5 does not scale the scores; the initial weights make up for it. None: 1 / √E.
    softmax_scale = 1.0 if traits.positions == "relative" else None
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
        normalization="LayerNorm" if traits.has_biases else "RMSNorm",
        add_bias_linear=traits.has_biases,
        add_qkv_bias=traits.has_qkv_biases,
        gated_linear_unit=traits.gated,
        qk_layernorm=bool(traits.qk_norm),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        # These fusions are wrapped in torch.compile (megatron/core/jit.py): they would compile while the run waits.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        # Weight gradients belong to the engine.
        async_tensor_model_parallel_allreduce=False,
        activation_func=_ACTIVATIONS[traits.activation],
        softmax_scale=softmax_scale,
    )


def _block_spec(shape: ModelShape, dropout: Dropout, causal: bool) -> TransformerBlockSubmodules:
    """The specification of a stack of layers: of a decoder, or without causality of an encoder."""
    traits = shape.traits
    input_norm, last_linear, feed_forward = WrappedTorchNorm, RowLinear, FeedForward
    if traits.norms_outputs:
        input_norm, last_linear, feed_forward = IdentityOp, NormedRowLinear, NormedFeedForward

    bias_dropout_add = get_bias_dropout_add
    if dropout.probability:
        bias_dropout_add = ModuleSpec(module=BiasDropoutAdd, params={"dropout": dropout})

    def qk_norm(num_heads: int) -> Any:
        together = num_heads if traits.qk_norm == "projection" else 1
        return ModuleSpec(module=QKNorm, params={"num_heads": together}) if traits.qk_norm else IdentityOp

    def attention(layer: int) -> ModuleSpec:
        return ModuleSpec(
            module=SelfAttention if traits.rotates(layer) else UnrotatedAttention,
            params={"attn_mask_type": AttnMaskType.causal if causal else AttnMaskType.no_mask},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnLinear,
                core_attention=FusedAttention,
                linear_proj=last_linear,
                q_layernorm=qk_norm(shape.num_attn_heads),
                k_layernorm=qk_norm(shape.num_kv_heads),
            ),
        )

    across: dict[str, Any] = {}
    if causal and traits.is_encoder_decoder:
        submodules = CrossAttentionSubmodules(
            linear_q=ColumnLinear, linear_kv=ColumnLinear, core_attention=FusedAttention, linear_proj=RowLinear
        )
        no_mask = {"attn_mask_type": AttnMaskType.no_mask}
        across["pre_cross_attn_layernorm"] = WrappedTorchNorm
        across["cross_attention"] = ModuleSpec(module=CrossAttention, params=no_mask, submodules=submodules)
        across["cross_attn_bda"] = bias_dropout_add
    specs = [
        ModuleSpec(
            module=Layer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=input_norm,
                self_attention=attention(layer),
                self_attn_bda=bias_dropout_add,
                **across,
                pre_mlp_layernorm=input_norm,
                mlp=MixtureOfExperts if layer in shape.moe_layers else feed_forward,
                mlp_bda=bias_dropout_add,
            ),
        )
        for layer in range(shape.num_layers)
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)
