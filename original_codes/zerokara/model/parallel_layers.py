"""megatron-core's linear layers and embedding (0.16.1), as plain products where there is no tensor parallelism.

megatron-core's way through a linear layer is an autograd function for communication: torch.compile cannot see into it,
and in RowParallelLinear stops at a warning (tensor_parallel/layers.py:1243 passes no group). With tensor parallelism it
stays as it is, with the group named.

Shape suffixes: B batch, S sequence, D hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import embedding, linear

from zerokara.model import parallel
from zerokara.model.megatron_core import (
    ColumnParallelLinear,
    RowParallelLinear,
    reduce_from_tensor_model_parallel_region,
)


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


def embed_without_waits(word_embeddings: Any) -> None:
    """Let a VocabParallelEmbedding compute the same without waiting for the device.

    megatron-core assigns through masks, `output[mask] = 0`: on a GPU each of them asks where the mask is true.
    """
    if parallel.tensor_size() == 1:
        return
    first, end = word_embeddings.vocab_start_index, word_embeddings.vocab_end_index

    def forward(ids_BS: Tensor) -> Tensor:
        is_others_BS = (ids_BS < first) | (ids_BS >= end)
        rows_BSD = embedding((ids_BS - first).masked_fill(is_others_BS, 0), word_embeddings.weight)
        own_BSD = rows_BSD.masked_fill(is_others_BS[..., None], 0)
        whole_BSD: Tensor = reduce_from_tensor_model_parallel_region(own_BSD, group=word_embeddings.tp_group)
        return whole_BSD

    word_embeddings.forward = forward
