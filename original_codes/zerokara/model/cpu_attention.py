"""Attention on a CPU, where torch's fused kernels are not the best way: without a bias, and with a learned one.

`blocked_attention`: torch's flash kernel for CPUs goes through small tiles, one thread a head, and in bf16 computes
them in fp32, which a processor's bf16 units do not serve. Here each block of queries meets all keys that it may attend
to in one batched product, so that causal attention skips most of what it must not see, and the probabilities are kept
for the backward pass where they are small. Time of both passes over the flash kernel's, heads of 64, two threads of an
EPYC with AVX-512 bf16, in bf16 and fp32: S 128 0.29 and 0.80, S 256 0.46 and 0.88, S 512 0.47 and 0.64, S 1024 0.81 and
1.13. In fp32 the flash kernel serves what is longer.

`BiasedAttention` adds a learned bias to the scores (T5). torch's fused kernels for CPUs give a bias no gradient; with
one that needs it, `scaled_dot_product_attention` keeps scores and probabilities [B, H, S, T] of every layer, in fp32.
Here the forward pass is the fused kernel, and the backward pass computes the probabilities again, a few samples at a
time. Measured at B 8, H 8, S 512, E 64 in 6 layers: 312 instead of 720 MB, in no more time. (On a GPU the
memory-efficient kernel serves, which keeps no scores.)

With P the probabilities, O = P·V, G the gradient of O, and c the scale (Dao et al., 2022): dV = Pᵀ·G,
dS = P ∘ (G·Vᵀ - rowsum(G ∘ O)), dQ = c·dS·K, dK = c·dSᵀ·Q. The gradient of a bias is dS, summed over the batch.

Shape suffixes: B batch, H heads, K key heads, G = B·K, R = H / K queries' heads that share a key head, S queries,
T keys, W queries of a block, U keys that a block may see, E head dim; 1 where all samples or heads share a tensor.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 64
"""Queries in a block where attention is causal."""
MAX_FP32 = 512
"""Queries up to which blocks are faster than torch's kernel in fp32."""
MAX_SCORES = 1 << 23
"""Scores computed at a time, of at least one sample or key head: 16 MB in bf16, 32 MB in fp32."""
MAX_KEPT = 1 << 23
"""Probabilities that a layer keeps for its backward pass in bf16; where there are more, they are computed again."""


def serves(query_BHSE: Tensor) -> bool:
    """True where `blocked_attention` is the faster way."""
    is_short = query_BHSE.size(2) <= MAX_FP32
    return query_BHSE.device.type == "cpu" and (query_BHSE.dtype == torch.bfloat16 or is_short)


def serves_bias(bias: Tensor) -> bool:
    """True where a bias is learned and `BiasedAttention` takes less memory."""
    return bias.device.type == "cpu" and bias.requires_grad and bias.size(0) == 1


def blocked_attention(
    query_BHSE: Tensor,
    key_BKTE: Tensor,
    value_BKTE: Tensor,
    is_causal: bool,
    scale: float | None = None,
    mask_B1ST: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale · Q·Kᵀ)·V, [B, H, S, E].

    `is_causal` hides the keys behind a query; `mask_B1ST`, True where a query may attend to a key, includes that and
    leaves each query one key at least. `scale` None is 1/√E.
    """
    batch, heads, queries, size = query_BHSE.shape
    groups, repeats = batch * key_BKTE.size(1), heads // key_BKTE.size(1)
    out, _ = _blocked(
        query_BHSE.reshape(groups, repeats, queries, size),
        key_BKTE.reshape(groups, -1, size),
        value_BKTE.reshape(groups, -1, size),
        mask_B1ST,
        is_causal,
        size**-0.5 if scale is None else scale,
    )
    return out.view(query_BHSE.shape)


# As operators of torch's they are one call each to its compiler, which would otherwise write code for every block; and
# their names stand in a profile (`training.worker`). They take tensors and numbers alone, and so many of them.
@torch.library.custom_op("zerokara::blocked_attention", mutates_args=())
def _blocked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """The values attended to, and each block's probabilities where they are to be kept."""
    out, kept = torch.empty_like(query), []
    for block in _blocks(query, key, is_causal, mask):
        part, rows, seen, _ = block
        # The queries of all heads that share a key head, one after another.
        q_GQE, k_GUE, v_GUE = query[part, :, rows].flatten(1, 2), key[part, :seen], value[part, :seen]
        p_GQU = _probabilities(q_GQE * scale, k_GUE, block)
        out[part, :, rows] = (p_GQU @ v_GUE).view(out[part, :, rows].shape)
        kept += [p_GQU] if _keeps(query, key) else []
    return out, kept


@_blocked.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, list[Tensor]]:
    shapes = [
        (part.stop - part.start, query.size(1) * (rows.stop - rows.start), seen)
        for part, rows, seen, _ in _blocks(query, key, is_causal, mask)
        if _keeps(query, key)
    ]
    return torch.empty_like(query), [query.new_empty(shape) for shape in shapes]


@torch.library.custom_op("zerokara::blocked_attention_backward", mutates_args=())
def _blocked_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kept: list[Tensor],
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # Each block adds to the keys that it sees: in fp32, since in bf16 each addition would round.
    d_key, d_value = (torch.zeros_like(each, dtype=torch.float32) for each in (key, value))
    d_query = torch.empty_like(query)
    for number, block in enumerate(_blocks(query, key, is_causal, mask)):
        part, rows, seen, _ = block
        q_GQE, g_GQE = query[part, :, rows].flatten(1, 2), gradient[part, :, rows].flatten(1, 2)
        k_GUE, v_GUE = key[part, :seen], value[part, :seen]
        p_GQU = kept[number] if kept else _probabilities(q_GQE * scale, k_GUE, block)
        d_value[part, :seen] += p_GQU.mT @ g_GQE
        d_scores = torch.ops.aten._softmax_backward_data(_by_transposed(g_GQE, v_GUE), p_GQU, -1, p_GQU.dtype)
        d_query[part, :, rows] = (d_scores @ k_GUE).mul_(scale).view(d_query[part, :, rows].shape)
        d_key[part, :seen] += d_scores.mT @ q_GQE
    return d_query, d_key.mul_(scale).to(key.dtype), d_value.to(value.dtype)


@_blocked_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    *tensors, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: list[Tensor]) -> tuple[Tensor | None, ...]:
    query, key, value, mask, *kept = ctx.saved_tensors
    return *_blocked_backward(gradient, query, key, value, mask, kept, ctx.is_causal, ctx.scale), None, None, None


_blocked.register_autograd(_differentiate, setup_context=_setup)


def _keeps(query_GRSE: Tensor, key_GTE: Tensor) -> bool:
    return query_GRSE[..., 0].numel() * key_GTE.size(1) <= MAX_KEPT


class _Block(NamedTuple):
    part: slice
    """Of the G key heads; with a mask they are of one sample, or of whole ones."""
    rows: slice
    """Of the S queries."""
    seen: int
    """U, the keys that these queries may see."""
    may_attend_BWL: Tensor | None
    """True where a query may attend to one of the last L of these keys; B is 1 without a mask. None: everywhere."""


def _blocks(query_GRSE: Tensor, key_GTE: Tensor, is_causal: bool, mask_B1ST: Tensor | None) -> Iterator[_Block]:
    groups, repeats, queries, _ = query_GRSE.shape
    width = BLOCK if is_causal else queries
    for start in range(0, queries, width):
        end = min(start + width, queries)
        rows, seen, may_attend = slice(start, end), end if is_causal else key_GTE.size(1), None
        step, of_sample = max(1, MAX_SCORES // (repeats * (end - start) * seen)), 1
        if mask_B1ST is not None:
            of_sample = groups // len(mask_B1ST)
            step = step // of_sample * of_sample or math.gcd(step, of_sample)
        elif is_causal:  # what lies before the block's first query is seen by all of it
            may_attend = torch.ones(1, end - start, end - start, dtype=torch.bool).tril_()
        for first in range(0, groups, step):
            last = min(first + step, groups)
            if mask_B1ST is not None:
                may_attend = mask_B1ST[first // of_sample : -(-last // of_sample), 0, rows, :seen]
            yield _Block(slice(first, last), rows, seen, may_attend)


def _probabilities(scaled_query_GQE: Tensor, key_GUE: Tensor, block: _Block) -> Tensor:
    """softmax(scale · Q·Kᵀ) of a block, [G, R·W, U]."""
    scores_GQU = _by_transposed(scaled_query_GQE, key_GUE)
    if (may_attend_BWL := block.may_attend_BWL) is not None:
        samples, width, length = may_attend_BWL.shape
        hidden_BWL = scores_GQU.new_zeros(may_attend_BWL.shape).masked_fill_(~may_attend_BWL, float("-inf"))
        scores_GQU.view(samples, -1, width, block.seen)[..., -length:].add_(hidden_BWL[:, None])
    return scores_GQU.softmax(-1)


def _by_transposed(left_GQE: Tensor, right_GUE: Tensor) -> Tensor:
    """L·Rᵀ. A product in bf16 would copy the Rᵀ of a slice in the order of its columns, which is slow."""
    return left_GQE @ (right_GUE.contiguous() if right_GUE.dtype == torch.bfloat16 else right_GUE).mT


class BiasedAttention(torch.autograd.Function):
    """softmax(scale · Q·Kᵀ + bias)·V, [B, H, S, E]; a mask [B, 1, S, T] is True where a query may attend to a key."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, mask: Tensor | None
    ) -> Tensor:
        cast = bias.to(query.dtype)
        if mask is None:
            out = scaled_dot_product_attention(query, key, value, attn_mask=cast, scale=scale)
        else:  # a mask for each sample joins the bias a few samples at a time
            out = torch.empty_like(query)
            for part in _parts(query, key):
                masked = cast.masked_fill(~mask[part], float("-inf"))
                q, k, v = query[part], key[part], value[part]
                out[part] = scaled_dot_product_attention(q, k, v, attn_mask=masked, scale=scale)
        ctx.save_for_backward(query, key, value, bias, out, mask)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, mask = ctx.saved_tensors
        (gradient,) = gradients
        d_query, d_key, d_value = (torch.empty_like(each) for each in (query, key, value))
        d_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        for part in _parts(query, key):
            q, k, v, g, o = (each[part].float() for each in (query, key, value, gradient, out))
            added = bias.float() if mask is None else bias.float().masked_fill(~mask[part], float("-inf"))
            probabilities = torch.softmax((q * ctx.scale) @ k.mT + added, dim=-1)
            d_value[part] = probabilities.mT @ g
            d_scores = (g @ v.mT - (g * o).sum(-1, keepdim=True)).mul_(probabilities)
            d_bias += d_scores.sum(0, keepdim=True)
            d_query[part] = (d_scores @ k) * ctx.scale
            d_key[part] = (d_scores.mT @ q) * ctx.scale
        return d_query, d_key, d_value, d_bias.to(bias.dtype), None, None


def _parts(query: Tensor, key: Tensor) -> list[slice]:
    """Samples whose scores are held at a time."""
    samples = max(1, MAX_SCORES // (query.size(1) * query.size(2) * key.size(2)))
    return [slice(start, start + samples) for start in range(0, len(query), samples)]
