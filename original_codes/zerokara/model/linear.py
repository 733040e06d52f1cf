"""megatron-core's linear layers (0.16.1), as torch's own matrix product where one process holds the whole matrix.

megatron-core's way through them is an autograd function that knows of communication: torch.compile cannot see into it,
and in RowParallelLinear stops at a warning (tensor_parallel/layers.py:1243 passes no group). Alone there is nothing to
communicate. With tensor parallelism it stays as it is, with the group named.
"""

from __future__ import annotations

import zerokara.model.import_megatron  # noqa: F401  # before megatron-core

# isort: split
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn.functional import linear

from zerokara.model import parallel


class _PlainAlone:
    """In front of a layer of megatron-core: its product, without a detour where nobody shares the matrix."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._alone = parallel.tensor_size() == 1

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **rest: Any) -> Tensor:
        if self._alone:
            return linear(input, weight, bias)
        rest["tp_group"] = self.tp_group  # type: ignore[attr-defined]
        product: Tensor = super()._forward_impl(input=input, weight=weight, bias=bias, **rest)  # type: ignore[misc]
        return product


class ColumnLinear(_PlainAlone, ColumnParallelLinear):
    """Of T processes each computes a T-th of the outputs."""


class RowLinear(_PlainAlone, RowParallelLinear):
    """Of T processes each multiplies a T-th of the inputs; the products are added up."""
