"""megatron-core's linear layers (0.16.1), as torch's own matrix product where there is no tensor parallelism.

megatron-core's way through them is an autograd function for communication: torch.compile cannot see into it, and in
RowParallelLinear stops at a warning (tensor_parallel/layers.py:1243 passes no group). With tensor parallelism it stays
as it is, with the group named.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from zerokara.model import parallel
from zerokara.model.megatron_core import ColumnParallelLinear, RowParallelLinear


class _PlainProduct:
    """Stands before a layer class of megatron-core: a plain product where this process holds the whole matrix."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._alone = parallel.tensor_size() == 1

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **rest: Any) -> Tensor:
        if self._alone:
            return linear(input, weight, bias)
        rest["tp_group"] = self.tp_group  # type: ignore[attr-defined]
        product: Tensor = super()._forward_impl(input=input, weight=weight, bias=bias, **rest)  # type: ignore[misc]
        return product


class ColumnLinear(_PlainProduct, ColumnParallelLinear):
    """Column-parallel: each of T ranks computes a T-th of the outputs."""


class RowLinear(_PlainProduct, RowParallelLinear):
    """Row-parallel: each of T ranks multiplies a T-th of the inputs; the products are summed."""
