"""Causal attention within documents of many lengths, by torch's kernel for them: FlashAttention on a GPU.

The sequences of a micro batch lie one after the other, and the kernel is told where each document begins: no mask of
[S, S], and no work between documents. How many documents there are the host knows when it makes the batch, so that
nobody waits for the device; their greatest length is not asked for, S is an upper bound (the kernel's blocks beyond the
end of a document return at once). Source: torch 2.13, torch/nn/attention/varlen.py.

Shape suffixes: S sequence, B batch, P = B·S packed positions, N documents, H heads, K kv heads, E head dim, D = H·E.
"""

from __future__ import annotations

import torch
from torch import Tensor


def has_kernel(weight: Tensor, head_dim: int) -> bool:
    """Whether the kernel, FlashAttention 2, serves heads of this size where this weight lies, in its format."""
    return (
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(weight.device) >= (8, 0)  # Ampere
    )


def attention(
    query_SBHE: Tensor, key_SBKE: Tensor, value_SBKE: Tensor, offsets_N1: Tensor, scale: float | None
) -> Tensor:
    """Return the attended values, [S, B, D]; `offsets_N1` in int32, ascending, from 0 to P.

    Documents lie within a sequence each: position s of sequence b is b · S + s.
    """
    from torch.nn.attention.varlen import varlen_attn  # loads torch's compiler, for which a CPU has no use

    length, batch, num_heads, _ = query_SBHE.shape
    query_PHE, key_PKE, value_PKE = (x.transpose(0, 1).flatten(0, 1) for x in (query_SBHE, key_SBKE, value_SBKE))
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
        enable_gqa=key_PKE.size(1) != num_heads,
    )
    assert isinstance(out_PHE, Tensor)
    return out_PHE.unflatten(0, (batch, length)).transpose(0, 1).flatten(2)
