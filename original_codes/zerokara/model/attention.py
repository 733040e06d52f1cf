"""Attention on torch's `scaled_dot_product_attention`, as the `core_attention` of a megatron-core layer.

It picks FlashAttention on a GPU and torch's own flash kernel on a CPU, never builds the S×S matrix, and reads grouped
keys and values without repeating them. On a CPU it is about 1.5 times as fast as megatron-core's DotProductAttention.
Where documents are isolated it is given a mask, one for all layers, and no longer knows that it is causal.

Shape suffixes: S sequence, B batch, H heads, K kv heads, E head width, D width = H·E.
"""

from __future__ import annotations

import zerokara.model.import_megatron  # noqa: F401  # before megatron-core

# isort: split
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class FusedAttention(torch.nn.Module):
    """Drop-in for megatron.core.transformer.dot_product_attention.DotProductAttention (0.16.1), dropout 0."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ):
        super().__init__()
        self.causal = attn_mask_type == AttnMaskType.causal
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_SBHE: Tensor,
        key_SBKE: Tensor,
        value_SBKE: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Give the attended values, [S, B, D].

        `attention_mask` is True where a position may attend to another, the causal ones only (`isolation`); it is no
        mask of megatron-core's, which would be True where it may not.
        """
        query_BHSE, key_BKSE, value_BKSE = (x.permute(1, 2, 0, 3) for x in (query_SBHE, key_SBKE, value_SBKE))
        assert attention_mask is None or attention_bias is None
        mask = attention_bias if attention_mask is None else attention_mask
        repeats = query_BHSE.size(1) // key_BKSE.size(1)
        if mask is not None and repeats > 1:
            # With a mask, the fused kernel of a GPU wants as many keys as queries; grouped ones go to the slow path.
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
        return out_BHSE.permute(2, 0, 1, 3).flatten(2)


def isolation(segments_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Positions that restart in each segment [B, S], and where attention may go [B, 1, S, S], for ascending segments.

    Learned positions need the restart. Rotary ones only ever act by the distance of two positions, which is the same
    wherever the count begins: there the mask alone is enough.
    """
    places_S = torch.arange(segments_BS.size(1), device=segments_BS.device)
    begins_BS = torch.ones_like(segments_BS, dtype=torch.bool)
    begins_BS[:, 1:] = segments_BS[:, 1:] != segments_BS[:, :-1]
    first_BS = torch.where(begins_BS, places_S, 0).cummax(dim=1).values
    # A document is one stretch, so that a position sees what lies between its document's first position and itself.
    may_attend_BSS = (places_S >= first_BS[:, :, None]) & (places_S <= places_S[:, None])
    return places_S - first_BS, may_attend_BSS[:, None]
