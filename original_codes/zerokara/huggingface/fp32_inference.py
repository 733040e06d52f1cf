"""Inference in fp32 with a model saved in bf16, without an fp32 copy of it.

Inside `Fp32Inference` every product of fp32 activations with narrower weights first widens the weights to fp32, block
by block, in one small buffer. (It is kept: a new one for each product breaks up the heap, by 70 MB where a model of 160
million parameters generates 60 tokens.) Widening bf16 to fp32 is exact, so the result is that of the same model loaded
in fp32, up to the order in which terms are added. An operation that is not widened cannot go unnoticed: torch refuses
a product of two precisions, and a product of two narrow tensors is far too coarse for the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

BLOCK_ELEMENTS = 1 << 20
"""Weights widened at a time, 4 MB in fp32, which stay in the cache until they are multiplied."""
_NARROW = {torch.bfloat16, torch.float16}


class Fp32Inference(TorchFunctionMode):
    """A context manager in which a model computes in fp32; for inference only."""

    _buffer: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is functional.linear:
            return self._linear(*args, **named)
        if func is functional.embedding:
            return func(*args, **named).float()
        if func is torch.addmm:  # Hugging Face's Conv1D, whose weight is [in, out]
            bias, rows, weight = args
            return self._linear(rows, weight.t(), bias)
        if func is Tensor.to and _narrows(args, named):  # T5's norms cast to the precision of their weights
            return args[0]
        dtypes = {each.dtype for each in (*args, *named.values()) if isinstance(each, Tensor)}
        if torch.float32 in dtypes and not dtypes.isdisjoint(_NARROW):
            args, named = map(_widened, args), {name: _widened(each) for name, each in named.items()}
        return func(*args, **named)

    def _linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if rows.dtype != torch.float32 or weight.dtype == torch.float32:
            return functional.linear(rows, weight, bias)
        if self._buffer is None:
            self._buffer = rows.new_empty(BLOCK_ELEMENTS)
        blocks = weight.split(BLOCK_ELEMENTS // weight.shape[1])
        wide = (self._buffer[: block.numel()].view(block.shape).copy_(block) for block in blocks)
        product = torch.cat([functional.linear(rows, block) for block in wide], dim=-1)
        return product if bias is None else product + bias.float()


def _narrows(args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether `Tensor.to` would cast an fp32 tensor to a narrower precision."""
    return args[0].dtype == torch.float32 and any(one in _NARROW for one in (*args[1:], *named.values()))


def _widened(argument: Any) -> Any:
    return argument.float() if isinstance(argument, Tensor) and argument.dtype in _NARROW else argument
