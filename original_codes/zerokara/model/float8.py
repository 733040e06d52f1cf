"""``precision: fp8``: bf16, with the products of attention's and dense feed-forward layers' matrices in float8.

A tensor is divided by a scale that brings its largest number to the format's largest, once for the whole tensor and
anew at each product. Forward both factors are in e4m3 (3 bits of mantissa); backward the gradient is in e5m2, which
reaches further. Products add up in fp32 or a little less, and are given in bf16. Master weights, gradients' sums and
everything between the products stay as in bf16 (Micikevicius et al., 2022, arXiv 2209.05433; the recipe of nanochat and
of torchtitan's `tensorwise`).

Kernels differ in the order: the sum times one scale and then the other, the scales first, or each factor by its own;
cuBLASLt does not say. Both scales are given as their geometric mean, so that each partial result lies between the sum
and the result. Where the product of the two largest numbers is from 1e-30 to fp32's largest, every order gives the same
but for rounding, with nothing infinite or zero on the way: 3e38 times one is 3e38.

Only training computes so: validation is without gradients, and in bf16, as the exported model is evaluated.

On a GPU torch._scaled_mm (2.13) takes the first factor by rows and the second by columns; the lengths that are added
over, and those of the result's columns, must be multiples of 16. Tokens are filled up with zeros, which change nothing;
the product of a weight of other sizes is in bf16. On a CPU the sums are plain products in fp32: there torch asks the
processor for AMX, and not oneDNN, which may lack float8 all the same (ONEDNN_MAX_CPU_ISA, an old kernel).

Letters: M tokens, K inputs, N outputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16


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
        (inputs8_MK, inputs_root), (weight8_NK, weight_root) = _cast(inputs_MK, FORWARD), _cast(weight_NK, FORWARD)
        ctx.save_for_backward(inputs8_MK, inputs_root, weight_NK)
        return _multiply(inputs8_MK, weight8_NK, inputs_root * weight_root)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        inputs8_MK, inputs_root, weight_NK = ctx.saved_tensors
        gradient8_MN, root = _cast(gradients[0], GRADIENT)
        weight8_NK, weight_root = _cast(weight_NK, FORWARD)
        weight8_KN, inputs8_KM, gradient8_NM = (
            each.t().contiguous() for each in (weight8_NK, inputs8_MK, gradient8_MN)
        )
        return (
            _multiply(gradient8_MN, weight8_KN, root * weight_root),
            _multiply(gradient8_NM, inputs8_KM, root * inputs_root),
        )


def _cast(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the tensor over a scale, and the scale's root, an fp32 scalar; not finite where one of its numbers is."""
    # All zeros have the least scale: they stay zeros. What is not finite makes the scale so, and with it the product.
    scale = (tensor.abs().amax().float() / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (tensor.float() / scale).to(dtype).contiguous(), scale.sqrt()


def _multiply(left_MK: Tensor, right_NK: Tensor, scale: Tensor) -> Tensor:
    """[M, K] times the transpose of [N, K], both by rows, and twice by the scale, in bf16."""
    if left_MK.device.type == "cpu":
        return (left_MK.float() @ right_NK.float().t() * scale * scale).bfloat16()
    # In the backward pass sums are kept in full fp32: gradients are the sums of many more, and smaller, numbers.
    fast, kind = left_MK.dtype == FORWARD, torch.bfloat16
    out_MN: Tensor = torch._scaled_mm(left_MK, right_NK.t(), scale, scale, out_dtype=kind, use_fast_accum=fast)
    return out_MN
