"""How each parameter is cut among the processes of a tensor group, by its name: a pure table and its two directions.

Of T processes, process r holds of a whole parameter
- *rows*: the r-th of T equal parts of its rows. Heads stand group by group in `linear_qkv` (the queries of a kv head,
  its key, its value), so that equal parts are whole groups; and the rows of the vocabulary;
- *gated rows*: of `linear_fc1` = [gate; up] the r-th part of the gate's rows, then the r-th part of up's;
- *columns*: the r-th of T equal parts of its columns: what multiplies the part of the width that the process computed;
- all of it, where it is *replicated*: norms, learned positions, biases of distances, and biases that are added once to
  a sum.

A checkpoint holds whole parameters, and so knows nothing of T.
Source of the layout: megatron/core/tensor_parallel/layers.py and transformer/mlp.py (0.16.1; the gated one's `stride`).

Example, T = 2: rows [a b c d] are [a b] and [c d]; gated rows [g0 g1 u0 u1] are [g0 u0] and [g1 u1].
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
import torch.distributed
from torch import Tensor

from zerokara.model import parallel
from zerokara.model.shapes import ModelShape


class Partition(Enum):
    """How a parameter is partitioned among tensor-parallel ranks."""

    ROWS = "rows"
    GATED_ROWS = "gated rows"
    COLUMNS = "columns"
    REPLICATED = "replicated"


_PARTITIONS = {
    "word_embeddings.weight": Partition.ROWS,
    "position_embeddings.weight": Partition.REPLICATED,
    "input_layernorm.weight": Partition.REPLICATED,
    "input_layernorm.bias": Partition.REPLICATED,
    "relative_attention_bias.weight": Partition.REPLICATED,
    "linear_qkv.weight": Partition.ROWS,
    "linear_q.weight": Partition.ROWS,
    "linear_kv.weight": Partition.ROWS,
    "linear_qkv.bias": Partition.ROWS,
    "q_layernorm.weight": Partition.REPLICATED,
    "k_layernorm.weight": Partition.REPLICATED,
    "linear_proj.weight": Partition.COLUMNS,
    "linear_proj.bias": Partition.REPLICATED,
    "pre_cross_attn_layernorm.weight": Partition.REPLICATED,
    "pre_mlp_layernorm.weight": Partition.REPLICATED,
    "pre_mlp_layernorm.bias": Partition.REPLICATED,
    "linear_fc1.weight": Partition.ROWS,
    "linear_fc1.bias": Partition.ROWS,
    "linear_fc2.weight": Partition.COLUMNS,
    "linear_fc2.bias": Partition.REPLICATED,
    "router.weight": Partition.REPLICATED,
    "experts_fc1.weight": Partition.REPLICATED,
    "experts_fc2.weight": Partition.REPLICATED,
    "final_layernorm.weight": Partition.REPLICATED,
    "final_layernorm.bias": Partition.REPLICATED,
    "output_layer.weight": Partition.ROWS,
}
"""By the last two words of the parameter's name."""


class Sharding:
    """The cuts of one model's parameters."""

    def __init__(self, gated: bool):
        """`gated` is whether `linear_fc1` holds a gate (`Architecture.gated`)."""
        self._gated = gated

    @classmethod
    def of(cls, shape: ModelShape) -> Sharding:
        """The cuts of a model of this shape."""
        return cls(shape.traits.gated)

    def partition(self, name: str) -> Partition:
        """How the parameter `name` is cut; a KeyError where the table does not know it."""
        ending = ".".join(name.split(".")[-2:])
        return Partition.GATED_ROWS if self._gated and "linear_fc1" in ending else _PARTITIONS[ending]

    def is_replicated(self, name: str) -> bool:
        """Whether every tensor-parallel rank holds all of the parameter `name`."""
        return self.partition(name) is Partition.REPLICATED

    def local(self, name: str, whole: Tensor, rank: int | None = None, size: int | None = None) -> Tensor:
        """What process `rank` of `size` holds of a whole parameter; by default this process of its tensor group."""
        rank = parallel.tensor_rank() if rank is None else rank
        size = parallel.tensor_size() if size is None else size
        partition = self.partition(name)
        if size == 1 or partition is Partition.REPLICATED:
            return whole
        if partition is Partition.GATED_ROWS:
            return torch.cat([_part(half, 0, rank, size) for half in whole.chunk(2)])
        return _part(whole, 1 if partition is Partition.COLUMNS else 0, rank, size)

    def whole(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """The inverse of `local`, from what all processes of a tensor group hold, in their order."""
        partition = self.partition(name)
        if len(shards) == 1 or partition is Partition.REPLICATED:
            return shards[0]
        if partition is Partition.GATED_ROWS:
            return torch.cat([shard.chunk(2)[half] for half in (0, 1) for shard in shards])
        return torch.cat(list(shards), dim=1 if partition is Partition.COLUMNS else 0)

    def whole_shape(self, name: str, local: torch.Size, size: int | None = None) -> torch.Size:
        """The shape of a whole parameter of which each process of the tensor group holds `local`."""
        size = parallel.tensor_size() if size is None else size
        partition = self.partition(name)
        if partition is Partition.REPLICATED:
            return local
        if partition is Partition.COLUMNS:
            return torch.Size((local[0], local[1] * size))
        return torch.Size((local[0] * size, *local[1:]))

    def gathered(self, name: str, local: Tensor) -> Tensor:
        """The whole of a parameter (or of what has its shape); every process of the tensor group must call it."""
        if parallel.tensor_size() == 1 or self.partition(name) is Partition.REPLICATED:
            return local
        local = local.contiguous()
        shards = [torch.empty_like(local) for _ in range(parallel.tensor_size())]
        torch.distributed.all_gather(shards, local, group=parallel.tensor_group())
        return self.whole(name, shards)


def _part(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    assert tensor.size(dim) % size == 0, f"{tuple(tensor.shape)} cannot be cut into {size} along {dim}"
    length = tensor.size(dim) // size
    return tensor.narrow(dim, rank * length, length)
