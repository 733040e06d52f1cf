"""Attention on torch's `scaled_dot_product_attention`, as the `core_attention` of a megatron-core layer.

It picks FlashAttention on a GPU and torch's own flash kernel on a CPU in fp32, never builds the S×S matrix, and serves
grouped queries without repeating keys and values; `cpu_attention` has what is better on a CPU otherwise.
With intra-document masking it is given one mask for all layers, in place of the causal flag.

On a GPU in bf16 it is given where each document begins instead, for torch's kernel for sequences of many lengths (torch
2.13, torch/nn/attention/varlen.py): no mask of [S, S], and no work between documents. The host knows their number when
it makes the batch, so that nobody waits for the device; their greatest length is not asked for, S is an upper bound
(the kernel's blocks beyond the end of a document return at once).

QK-norm is the RMSNorm of each head's queries and keys before the rotary embedding (Qwen3; Dehghani et al., 2023).
Attention scores are then bounded by the weight, and no longer grow until the softmax saturates. One weight of size E
serves all heads of a layer. OLMo 2 (arXiv 2501.00656) normalizes all heads together, by weights of sizes H·E and K·E.

Shape suffixes: S sequence, B batch, P = B·S packed positions, H heads, K kv heads, N either of the two (those of this
process; of offsets, documents), E head dim, D = H·E.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from zerokara.model import cpu_attention, parallel
from zerokara.model.layers import sequence_first
from zerokara.model.megatron_core import (
    AttnMaskType,
    SelfAttention,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    rope_utils,
)


class FusedAttention(torch.nn.Module):
    """Drop-in for megatron.core.transformer.dot_product_attention.DotProductAttention (0.16.1), dropout 0."""

    def __init__(self, attn_mask_type: AttnMaskType, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        self.causal = attn_mask_type == AttnMaskType.causal
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_SBHE: Tensor,
        key_SBKE: Tensor,
        value_SBKE: Tensor,
        attention_mask: Tensor | None,
        attention_bias: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the attended values, [S, B, D]; all of it as hidden states lie (`layers`).

        `attention_mask` is True where a position may attend to another, and includes causality (`intra_document_mask`);
        megatron-core's own masks would be True where it may not. Or it is the offsets of documents [N + 1]. It comes
        together with a bias only where `cpu_attention.serves_bias`.
        """
        if attention_mask is not None and attention_mask.dim() == 1:
            assert self.causal
            return variable_length_attention(query_SBHE, key_SBKE, value_SBKE, attention_mask, self.softmax_scale)
        heads = query_SBHE, key_SBKE, value_SBKE
        query_BHSE, key_BKSE, value_BKSE = (sequence_first(x).permute(1, 2, 0, 3) for x in heads)
        if attention_bias is not None and cpu_attention.serves_bias(attention_bias):
            assert self.softmax_scale is not None
            out_BHSE = cpu_attention.BiasedAttention.apply(
                query_BHSE, key_BKSE, value_BKSE, attention_bias, self.softmax_scale, attention_mask
            )
        elif attention_bias is None and (self.causal or attention_mask is None) and cpu_attention.serves(query_BHSE):
            out_BHSE = cpu_attention.blocked_attention(
                query_BHSE, key_BKSE, value_BKSE, self.causal, self.softmax_scale, attention_mask
            )
        else:
            assert attention_mask is None or attention_bias is None
            mask = attention_bias if attention_mask is None else attention_mask
            repeats = query_BHSE.size(1) // key_BKSE.size(1)
            if mask is not None and repeats > 1:
                # With a mask a GPU's fused kernels want as many key heads as query heads; else they are slow.
                key_BKSE, value_BKSE = (x.repeat_interleave(repeats, dim=1) for x in (key_BKSE, value_BKSE))
            out_BHSE = scaled_dot_product_attention(
                query_BHSE,
                key_BKSE,
                value_BKSE,
                attn_mask=mask,
                is_causal=self.causal and mask is None,
                scale=self.softmax_scale,
                enable_gqa=mask is None and repeats > 1,
            )
        return sequence_first(out_BHSE.permute(2, 0, 1, 3)).flatten(2)


def rotation_tables(angles: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """Cosines and sines of the rotary angles [S, 1, 1, E], one on the other, times a factor; in the number format of
    the heads."""
    return (factor * torch.stack((angles.cos(), angles.sin()))).to(dtype)


def rotate(heads_SBNE: Tensor, tables: Tensor, **_: Any) -> Tensor:
    """Rotate queries or keys by their positions, with `rotation_tables`.

    megatron-core's own function takes the cosine of the angle in each layer, and compiled for each number of each head.
    """
    cosines, sines = tables.unbind()
    first, second = heads_SBNE.chunk(2, dim=-1)
    return heads_SBNE * cosines + torch.cat((-second, first), dim=-1) * sines


rope_utils._apply_rotary_pos_emb_bshd = rotate


class UnrotatedAttention(SelfAttention):
    """Self-attention of a layer without positions (NoPE; Kazemnejad et al., 2023).

    A class of its own, and not megatron-core's `no_rope_freq`: by that each layer would be compiled anew.
    """

    def forward(self, *arguments: Any, rotary_pos_emb: Tensor | None = None, **named: Any) -> Any:
        """Attend without the rotation that the other layers are given."""
        return super().forward(*arguments, **named)


class QKNorm(torch.nn.RMSNorm):
    """A megatron-core `q_layernorm` or `k_layernorm` (0.16.1): [S, B, N, E] in and out; `hidden_size` is E."""

    eps: float

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float, num_heads: int = 1):
        """`num_heads` of all processes are normalized together; 1: each by itself, with the same weight."""
        super().__init__(num_heads * hidden_size, eps=eps)
        self._num_heads, self._alone = num_heads, parallel.tensor_size() == 1

    def forward(self, heads_SBNE: Tensor) -> Tensor:
        """Normalize each head, or all of them."""
        weight = self.weight
        if not self._alone:
            # Each process has some of the heads: the gradient of the weight is the sum over the processes.
            weight = copy_to_tensor_model_parallel_region(weight, group=parallel.tensor_group())
        if self._num_heads == 1:
            return rms_norm(heads_SBNE, self.normalized_shape, weight, self.eps)
        count, size = heads_SBNE.shape[2:]
        weight_NE = weight.view(-1, size)
        if self._alone:
            return rms_norm(heads_SBNE, (count, size), weight_NE, self.eps)
        heads_SBNE, dtype = heads_SBNE.float(), heads_SBNE.dtype
        squares_SB11 = heads_SBNE.square().sum((2, 3), keepdim=True)
        # Summed over the processes, and in the backward pass so is the gradient, as each process uses the sum.
        for collect in (reduce_from_tensor_model_parallel_region, copy_to_tensor_model_parallel_region):
            squares_SB11 = collect(squares_SB11, group=parallel.tensor_group())
        normed_SBNE = heads_SBNE * torch.rsqrt(squares_SB11 / weight.numel() + self.eps)
        first = parallel.tensor_rank() * count
        return (normed_SBNE * weight_NE[first : first + count]).to(dtype)


def intra_document_mask(segments_BS: Tensor) -> Tensor:
    """True where a position may attend to another: one of its segment that does not follow it, [B, 1, S, S]."""
    return same_segment(segments_BS, segments_BS).tril()


def same_segment(queries_BS: Tensor, keys_BT: Tensor) -> Tensor:
    """True where a query and a key are of the same segment, [B, 1, S, T]."""
    return queries_BS[:, None, :, None] == keys_BT[:, None, None, :]


def positions_in_documents(segments_BS: Tensor) -> Tensor:
    """Positions that restart in each segment [B, S], for ascending segments.

    Learned positions need the restart. Rotary ones only ever act by the distance of two positions, which does not
    depend on where the count starts: there the mask alone is enough.
    """
    positions_S = torch.arange(segments_BS.size(1), device=segments_BS.device)
    starts_BS = torch.ones_like(segments_BS, dtype=torch.bool)
    starts_BS[:, 1:] = segments_BS[:, 1:] != segments_BS[:, :-1]
    return positions_S - torch.where(starts_BS, positions_S, 0).cummax(dim=1).values


def has_variable_length_kernel(weight: Tensor, head_dim: int) -> bool:
    """True if the kernel, FlashAttention 2, serves heads of this size where this weight lies, in its format."""
    return (
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(weight.device) >= (8, 0)  # Ampere
    )


def variable_length_attention(
    query_SBHE: Tensor, key_SBKE: Tensor, value_SBKE: Tensor, offsets_N1: Tensor, scale: float | None
) -> Tensor:
    """Return the values attended causally within documents, [S, B, D]; all of it as hidden states lie (`layers`).

    `offsets_N1` in int32, ascending from 0 to P, are where documents begin, each within one sequence: position s of
    sequence b is b · S + s.
    """
    from torch.nn.attention.varlen import varlen_attn  # loads torch's compiler, for which a CPU has no use

    query_BSHE, key_BSKE, value_BSKE = (sequence_first(x).transpose(0, 1) for x in (query_SBHE, key_SBKE, value_SBKE))
    batch, length, num_heads, _ = query_BSHE.shape
    query_PHE, key_PKE, value_PKE = (x.flatten(0, 1) for x in (query_BSHE, key_BSKE, value_BSKE))
    out_PHE = varlen_attn(
        query_PHE,
        key_PKE,
        value_PKE,
        offsets_N1,
        offsets_N1,
        length,
        length,
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=num_heads > key_BSKE.size(2),
    )
    assert isinstance(out_PHE, Tensor)
    return sequence_first(out_PHE.unflatten(0, (batch, length)).transpose(0, 1)).flatten(2)
