"""Tensor-parallel sharding: from a whole parameter to the shard of each rank and back (`parameters.Partition`).

Of T ranks, rank r holds of a whole parameter
- *rows*: the r-th of T equal parts of its rows. Heads stand group by group in `linear_qkv` (the queries of a kv head,
  its key, its value), so that equal parts are whole groups;
- *gated rows*: of `linear_fc1` = [gate; up] the r-th part of the gate's rows, then the r-th part of up's;
- *columns*: the r-th of T equal parts of its columns, which multiply the part of the input that the rank computed;
- all of it, where it is *replicated*: norms, learned positions, relative position biases, routers and experts, and
  biases that are added once to a sum.

A checkpoint holds whole parameters, and so does not depend on T.
Source of the layout: megatron/core/tensor_parallel/layers.py and transformer/mlp.py (0.16.1; the gated one's `stride`).

Example, T = 2: rows [a b c d] are [a b] and [c d]; gated rows [g0 g1 u0 u1] are [g0 u0] and [g1 u1].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor

from zerokara.model import parallel
from zerokara.model.parameters import Partition, partition_of


class Sharding:
    """How one model's parameters are partitioned."""

    def __init__(self, gated: bool):
        """`gated` is whether `linear_fc1` holds a gate (`Architecture.gated`)."""
        self._gated = gated

    def partition(self, name: str) -> Partition:
        """The partition of the parameter `name`; raises KeyError where the table does not know it."""
        return partition_of(name, self._gated)

    def is_replicated(self, name: str) -> bool:
        """Whether every tensor-parallel rank holds all of the parameter `name`."""
        return self.partition(name) is Partition.REPLICATED

    def local(self, name: str, whole: Tensor, rank: int | None = None, size: int | None = None) -> Tensor:
        """The shard of a whole parameter that `rank` of `size` holds; by default this process of its group."""
        rank = parallel.tensor_rank() if rank is None else rank
        size = parallel.tensor_size() if size is None else size
        partition = self.partition(name)
        if size == 1 or partition is Partition.REPLICATED:
            return whole
        if partition is Partition.GATED_ROWS:
            return torch.cat([_shard(half, 0, rank, size) for half in whole.chunk(2)])
        return _shard(whole, 1 if partition is Partition.COLUMNS else 0, rank, size)

    def whole(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """The inverse of `local`, from the shards of all ranks of a group, in their order."""
        partition = self.partition(name)
        if len(shards) == 1 or partition is Partition.REPLICATED:
            return shards[0]
        if partition is Partition.GATED_ROWS:
            return torch.cat([shard.chunk(2)[half] for half in (0, 1) for shard in shards])
        return torch.cat(list(shards), dim=1 if partition is Partition.COLUMNS else 0)

    def whole_shape(self, name: str, local: torch.Size, size: int | None = None) -> torch.Size:
        """The shape of a whole parameter of which each rank holds a shard of shape `local`."""
        size = parallel.tensor_size() if size is None else size
        partition = self.partition(name)
        if partition is Partition.REPLICATED:
            return local
        if partition is Partition.COLUMNS:
            return torch.Size((local[0], local[1] * size))
        return torch.Size((local[0] * size, *local[1:]))

    def gathered(self, name: str, local: Tensor) -> Tensor:
        """A whole parameter (or a tensor of its shape) from all ranks' shards; every rank of the group must call it."""
        if parallel.tensor_size() == 1 or self.partition(name) is Partition.REPLICATED:
            return local
        local = local.contiguous()
        shards = [torch.empty_like(local) for _ in range(parallel.tensor_size())]
        torch.distributed.all_gather(shards, local, group=parallel.tensor_group())
        return self.whole(name, shards)


def _shard(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    assert tensor.size(dim) % size == 0, f"{tuple(tensor.shape)} cannot be split into {size} along dimension {dim}"
    length = tensor.size(dim) // size
    return tensor.narrow(dim, rank * length, length)
