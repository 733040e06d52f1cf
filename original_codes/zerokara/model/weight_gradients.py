"""Gradients of weights that a product adds to a sum in fp32, without a matrix in between.

Torch gives the gradient of each micro batch in bf16. Adding it to a sum in fp32 reads both, and writes the sum. A
product can begin with the sum instead. The sum is also more exact: no gradient is rounded before it is added.

Shape suffixes: M tokens, K inputs, N outputs, P of them.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

PART_NUMBERS = 1 << 19


def product(inputs: Tensor, weight_NK: Tensor, bias_N: Tensor | None, sum_NK: Tensor) -> Tensor:
    """Return what `linear` does; the backward pass adds the weight's gradient to the sum, and gives none."""
    out: Tensor = _Product.apply(inputs, weight_NK, bias_N, sum_NK)
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_NK: Tensor, bias_N: Tensor | None, sum_NK: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight_NK, sum_NK)
        ctx.has_bias = bias_N is not None
        return linear(inputs, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight_NK, sum_NK = ctx.saved_tensors
        gradient_MN = gradients[0].flatten(0, -2)
        _operation(sum_NK, gradient_MN.t(), inputs.flatten(0, -2))
        return gradients[0] @ weight_NK, None, gradient_MN.sum(0) if ctx.has_bias else None, None


def add_product(sum_NK: Tensor, gradient_NM: Tensor, inputs_MK: Tensor) -> None:
    """Add a product to a sum in fp32."""
    if gradient_NM.dtype == torch.float32:
        sum_NK.addmm_(gradient_NM, inputs_MK)
    elif adds_in_fp32(gradient_NM.device, gradient_NM.dtype):
        torch.addmm(sum_NK, gradient_NM, inputs_MK, out_dtype=torch.float32, out=sum_NK)
    else:  # in parts that a CPU's cache holds: torch converts a matrix before it adds it to another type
        rows = max(1, PART_NUMBERS // sum_NK.size(1)) if sum_NK.device.type == "cpu" else len(sum_NK)
        for sum_PK, gradient_PM in zip(sum_NK.split(rows), gradient_NM.split(rows), strict=True):
            sum_PK += gradient_PM @ inputs_MK


_operation = torch.library.custom_op("zerokara::add_product", add_product, mutates_args=("sum_NK",))
"""For torch's compiler: one operation, which it does not look into."""


@cache
def adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True where a product of numbers in `dtype` is added in fp32 without a matrix in between, and rightly.

    `addmm` has `out_dtype` on CUDA alone; some versions want the sum in `dtype` as well (aten/native/cuda/Blas.cpp),
    and some have added something else (pytorch issue 154086).
    """
    return device.type == "cuda" and _adds_rightly(device, dtype)


def _adds_rightly(device: torch.device, dtype: torch.dtype) -> bool:
    """Try it: a sum that is rounded to `dtype`, or left out, is off by far more than the order of an addition."""
    generator = torch.Generator(device).manual_seed(1)
    total, left, right = (torch.randn(128, 128, generator=generator, device=device) for _ in range(3))
    left, right = left.to(dtype), right.to(dtype)
    expected = total.double() + left.double() @ right.double()
    try:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return torch.allclose(total.double(), expected, rtol=0, atol=1e-3)
