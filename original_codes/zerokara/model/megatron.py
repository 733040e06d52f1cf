"""The one place that builds a megatron-core model (0.16.1); its names stay here.

megatron-core is sequence first and hands out logits or a loss; ours is batch first and hands out logits, or the
summed cross-entropy that the loop wants. megatron-core deprecates `GPTModel` from 0.19 on.

Shape suffixes: B batch, S sequence, N = B·S tokens, D width, V rows of the (padded) vocabulary.
"""

from __future__ import annotations

import zerokara.model.import_megatron  # noqa: F401  # before megatron-core

# isort: split
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from zerokara.model import cpu, initial_weights, parallel, recomputation
from zerokara.model.attention import FusedAttention, isolation
from zerokara.model.head_norm import HeadNorm
from zerokara.model.linear import ColumnLinear, RowLinear
from zerokara.model.loss import summed_cross_entropy
from zerokara.model.shapes import ModelShape
from zerokara.model.sharding import Cut, Sharding


class Decoder(GPTModel):
    """A decoder-only model: ``decoder(tokens_BS)`` gives logits, with labels the summed cross-entropy."""

    shape: ModelShape
    sharding: Sharding

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        mask_BS: Tensor | None = None,
        segments_BS: Tensor | None = None,
        at_B: Tensor | None = None,
    ) -> Tensor:
        """Give logits [B, S, padded V], or with labels the nats summed over tokens with mask 1, a scalar in fp32.

        Positions of different `segments_BS` (documents, in ascending order) know nothing of each other. With `at_B`
        the logits are those of that one position of each row, [B, 1, padded V].
        """
        if segments_BS is None:
            positions_BS = torch.arange(tokens_BS.size(1), device=tokens_BS.device).expand_as(tokens_BS)
            may_attend = None
        else:
            positions_BS, may_attend = isolation(segments_BS)
        hidden_SBD = super().forward(tokens_BS, positions_BS, may_attend)
        weight_VD = (
            self.shared_embedding_or_output_weight() if self.shape.tie_word_embeddings else self.output_layer.weight
        )
        if labels_BS is None:
            group = parallel.tensor_group()
            if at_B is not None:
                hidden_SBD = hidden_SBD[at_B, torch.arange(len(at_B), device=at_B.device)].unsqueeze(0)
            hidden_BSD = copy_to_tensor_model_parallel_region(hidden_SBD, group=group).transpose(0, 1)
            return gather_from_tensor_model_parallel_region(linear(hidden_BSD, weight_VD), group=group)
        mask_BS = torch.ones_like(labels_BS, dtype=torch.float32) if mask_BS is None else mask_BS
        hidden_ND = hidden_SBD.transpose(0, 1).flatten(0, 1)
        return summed_cross_entropy(
            hidden_ND,
            weight_VD,
            labels_BS.flatten(),
            mask_BS.flatten(),
            self.shape.vocab_size,
            parallel.tensor_group() if parallel.tensor_size() > 1 else None,
        )

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Stop at the hidden states, [S, B, D]: projection and loss are ours."""
        return hidden_states


def build(
    shape: ModelShape,
    dtype: torch.dtype = torch.float32,
    seed: int | None = 0,
    activation_checkpointing: str = "off",
) -> Decoder:
    """Build this process's part of a model on the CPU, with the initial weights of `seed`; None leaves them undefined.

    The weights are drawn in fp32 and rounded to `dtype` afterwards, so the same seed gives the same model everywhere.
    What the backward pass computes again (`recomputation`) changes no result. `parallel.start` must have been called.
    """
    cpu.prepare()
    megatron_config = _FAMILIES[shape.architecture](shape)
    model = Decoder(
        config=megatron_config,
        transformer_layer_spec=_block_spec(shape),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.seq_len,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="learned_absolute" if shape.learns_positions else "rope",
        rotary_base=shape.rope_theta,  # declared int, used as float
    )
    model.shape, model.sharding = shape, Sharding.of(shape)
    for name, parameter in model.named_parameters():
        # What DeepSpeed goes by to count a replicated parameter once in the norm of the gradient (runtime/utils.py,
        # is_model_parallel_parameter); megatron-core marks only what it draws itself.
        parameter.tensor_model_parallel = model.sharding.cut(name) is not Cut.REPLICATED
    if seed is not None:
        initial_weights.draw(model, shape, seed)
    recomputation.apply(model.decoder.layers, activation_checkpointing)
    return model.to(dtype)


def num_parameters(model: Decoder) -> int:
    """The numbers of the whole model of which this process holds a part."""
    return sum(model.sharding.whole_shape(name, part.shape).numel() for name, part in model.named_parameters())


def _common(shape: ModelShape, **family: Any) -> TransformerConfig:
    return TransformerConfig(
        tensor_model_parallel_size=parallel.tensor_size(),
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attn_heads,
        num_query_groups=shape.num_kv_heads,
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


def _llama(shape: ModelShape) -> TransformerConfig:
    return _common(shape, normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True, activation_func=silu)


def _qwen3(shape: ModelShape) -> TransformerConfig:
    config = _llama(shape)
    config.qk_layernorm = True
    return config


def _gpt2(shape: ModelShape) -> TransformerConfig:
    tanh_gelu = partial(gelu, approximate="tanh")  # `gelu_new` in Hugging Face's GPT-2
    return _common(shape, normalization="LayerNorm", add_bias_linear=True, activation_func=tanh_gelu)


_FAMILIES: dict[str, Callable[[ModelShape], TransformerConfig]] = {"llama": _llama, "qwen3": _qwen3, "gpt2": _gpt2}
"""The model builder's table: what megatron-core is told of each family."""


def _block_spec(shape: ModelShape) -> TransformerBlockSubmodules:
    head_norm = HeadNorm if shape.norms_heads else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=FusedAttention,
            linear_proj=RowLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * shape.num_layers, layer_norm=WrappedTorchNorm)
