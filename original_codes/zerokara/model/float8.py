"""``precision: fp8``: bf16, with the products of attention's and dense feed-forward layers' matrices in float8.

A tensor is divided by a scale that brings its largest number to the format's largest, once for the whole tensor and
anew at each product. Forward both factors are in e4m3 (3 bits of mantissa); backward the gradient is in e5m2, which
reaches further. Products add up in fp32 or a little less, and are given in bf16. Master weights, gradients' sums and
everything between the products stay as in bf16 (Micikevicius et al., 2022, arXiv 2209.05433; the recipe of nanochat and
of torchtitan's `tensorwise`).

Only training computes so: validation is without gradients, and in bf16, as the exported model is evaluated.

torch._scaled_mm (2.13) takes the first factor by rows and the second by columns; on a GPU the lengths that are added
over, and those of the result's columns, must be multiples of 16. Tokens are filled up with zeros, which change nothing;
the product of a weight of other sizes is in bf16.

Letters: M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""See above."""


def product(inputs: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return what `linear` does, [..., N] in bf16, by factors in float8 where there will be a gradient."""
    inputs_MK = inputs.flatten(0, -2)
    if not torch.is_grad_enabled() or any(size % MULTIPLE for size in weight_NK.shape):
        return linear(inputs, weight_NK, bias_N)
    tokens = len(inputs_MK)
    if missing := -tokens % MULTIPLE:
        inputs_MK = pad(inputs_MK, (0, 0, 0, missing))
    out_MN: Tensor = Float8Product.apply(inputs_MK, weight_NK)
    out = out_MN[:tokens].view(*inputs.shape[:-1], -1)
    return out if bias_N is None else out + bias_N


class Float8Product(torch.autograd.Function):
    """[M, K] times the transpose of [N, K], in float8; its name stands in a profile."""

    @staticmethod
    def forward(ctx: Any, inputs_MK: Tensor, weight_NK: Tensor) -> Tensor:
        (inputs8_MK, inputs_scale), (weight8_NK, weight_scale) = _cast(inputs_MK, FORWARD), _cast(weight_NK, FORWARD)
        ctx.save_for_backward(inputs8_MK, inputs_scale, weight_NK)
        return _multiply(inputs8_MK, inputs_scale, weight8_NK, weight_scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        inputs8_MK, inputs_scale, weight_NK = ctx.saved_tensors
        gradient8_MN, scale = _cast(gradients[0], GRADIENT)
        weight8_NK, weight_scale = _cast(weight_NK, FORWARD)
        weight8_KN, inputs8_KM, gradient8_NM = (
            each.t().contiguous() for each in (weight8_NK, inputs8_MK, gradient8_MN)
        )
        return (
            _multiply(gradient8_MN, scale, weight8_KN, weight_scale),
            _multiply(gradient8_NM, scale, inputs8_KM, inputs_scale),
        )


def _cast(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the tensor over a scale, and the scale, a scalar in fp32; infinite or NaN where one of its numbers is."""
    limits = torch.finfo(torch.float32)
    # All zeros have the least scale: they stay zeros. What is not finite makes the scale so, and with it the product.
    scale = (tensor.abs().amax().float() / torch.finfo(dtype).max).clamp(min=limits.tiny)
    return (tensor.float() / scale).to(dtype).contiguous(), scale


def _multiply(left_MK: Tensor, left_scale: Tensor, right_NK: Tensor, right_scale: Tensor) -> Tensor:
    """[M, K] times the transpose of [N, K], both by rows, in bf16."""
    # In the backward pass sums are kept in full fp32: gradients are the sums of many more, and smaller, numbers.
    is_forward = left_MK.dtype == FORWARD
    out_MN: Tensor = torch._scaled_mm(
        left_MK, right_NK.t(), left_scale, right_scale, out_dtype=torch.bfloat16, use_fast_accum=is_forward
    )
    return out_MN
