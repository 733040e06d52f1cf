"""A check of attention before a run begins: its gradients are compared with those of plain operations in fp32.

Kernels have been released that give wrong gradients on some GPUs, at some lengths or with a mask, and no error: NaN
with cuDNN 9.20 (pytorch issue 196678), other numbers where there are few kv heads (193893). A run of weeks would learn
from them. What is compared has the run's size and grouping of heads, its lengths, masks and number format.

Letters: S sequence length, B batch, H query heads, K kv heads, E head dim.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from zerokara.base.errors import RunError
from zerokara.model.attention import FusedAttention, has_variable_length_kernel, intra_document_mask, same_segment
from zerokara.model.layers import sequence_first
from zerokara.model.megatron_core import AttnMaskType
from zerokara.model.shapes import ModelShape

MAX_ERROR = 0.02
"""Greatest error of a gradient, relative to its norm. Rounding to bf16 leaves 0.003 to 0.007."""
_MAX_LENGTH, _MAX_SCORES = 4096, 2**26
"""Longer sequences, and more kv heads than make so many scores, are left out: so it needs a GB or two, and a moment."""


class _Form(NamedTuple):
    """One of the ways in which a model calls attention."""

    name: str
    is_causal: bool
    mask: Tensor | None
    """As `FusedAttention` takes it."""
    whole_mask: Tensor
    """True where a position may attend to another, [1 or B, 1, queries, keys]."""
    has_bias: bool = False


def check_attention(shape: ModelShape, weight: Tensor, with_documents: bool) -> None:
    """Compare what computes attention on the device of a weight, in its number format, with plain operations.

    Raises:
        RunError: a gradient is not finite, or wrong.
    """
    repeats = shape.num_attn_heads // shape.num_kv_heads
    generator = torch.Generator(weight.device).manual_seed(1)
    for form in _forms(shape, weight, with_documents):
        queries, keys = form.whole_mask.shape[-2:]
        kv_heads = max(1, min(shape.num_kv_heads, _MAX_SCORES // (2 * repeats * queries * keys)))
        counts = (kv_heads * repeats, queries), (kv_heads, keys), (kv_heads, keys)
        sizes: list[tuple[int, ...]] = [
            (*((2, length) if weight.is_cuda else (length, 2)), count, shape.head_dim) for count, length in counts
        ]
        sizes += [(1, kv_heads * repeats, queries, keys)] if form.has_bias else []
        drawn = [torch.randn(size, generator=generator, device=weight.device).to(weight.dtype) for size in sizes]
        names = ("queries", "keys", "values", "the position bias")
        gradients = _gradients(form, drawn, _as_trained), _gradients(form, [each.float() for each in drawn], _plainly)
        for name, found, expected in zip(names, *gradients, strict=False):
            error = float((found.float() - expected).norm() / expected.norm())
            if not error <= MAX_ERROR:  # nor where it is not a number
                raise RunError(
                    f"attention ({form.name}) gives a wrong gradient for {name} in {weight.dtype}: {error:.2g} of "
                    f"its norm away from that of plain operations in fp32, where {MAX_ERROR} is allowed. A run would "
                    "learn from it. If cudnn_attention is true, set it to false; else install another version of torch "
                    f"than {torch.__version__}, or set precision: fp32"
                )


def _forms(shape: ModelShape, weight: Tensor, with_documents: bool) -> Iterator[_Form]:
    read, target = (min(length, _MAX_LENGTH) for length in (shape.input_len, shape.target_len))
    # Segments of two documents, in queries and in keys.
    read_BS, target_BT = (
        (torch.arange(length, device=weight.device) >= length // 3).int().expand(2, -1) for length in (read, target)
    )
    if shape.traits.is_encoder_decoder:
        masks = same_segment(read_BS, read_BS), same_segment(target_BT, target_BT), same_segment(target_BT, read_BS)
        of_encoder, of_decoder, across = masks if with_documents else (torch.ones_like(each[:1]) for each in masks)
        yield _Form("encoder", False, None, of_encoder, has_bias=True)
        yield _Form("decoder", True, None, of_decoder.tril(), has_bias=True)
        mask = across if with_documents else None
        yield _Form("of the decoder to the encoder", False, mask, across)
        return
    whole = intra_document_mask(torch.zeros_like(read_BS))
    yield _Form("causal", True, None, whole)
    if with_documents:
        first, whole = read // 3, intra_document_mask(read_BS)
        starts = torch.tensor([0, first, read, read + first, 2 * read], dtype=torch.int32, device=weight.device)
        has_kernel = has_variable_length_kernel(weight, shape.head_dim)
        yield _Form("within documents", True, starts if has_kernel else whole, whole)


def _gradients(form: _Form, drawn: list[Tensor], attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """Gradients of all that is drawn; that of what is attended has no pattern, and is the same for both ways."""
    leaves = [each.detach().requires_grad_() for each in drawn]
    query, key, value, *rest = leaves
    # As `language_model` gives a decoder its bias: causality is in it.
    bias = rest[0].masked_fill(~form.whole_mask, float("-inf")) if rest else None
    out = attend(form, query, key, value, bias)
    return torch.autograd.grad(out, leaves, drawn[0].flatten(2).roll(1, dims=2))


def _as_trained(form: _Form, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    kind = AttnMaskType.causal if form.is_causal else AttnMaskType.no_mask
    attention = FusedAttention(attn_mask_type=kind, softmax_scale=query.size(-1) ** -0.5)
    return attention(query, key, value, form.mask, bias)


def _plainly(form: _Form, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    key, value = (each.repeat_interleave(query.size(2) // each.size(2), dim=2) for each in (key, value))
    query, key, value = (sequence_first(each).permute(1, 2, 0, 3) for each in (query, key, value))
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(query, key, value, form.whole_mask if bias is None else bias)
    return sequence_first(out.permute(2, 0, 1, 3)).flatten(2)
