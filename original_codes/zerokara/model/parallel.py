"""Tensor-parallel and data-parallel groups, and the tensor-parallel sharding of parameters.

Of W processes, T = tensor_parallel_size consecutive ones make a *tensor-parallel group*: together they hold one model,
and compute the same sequences. Processes of equal rank in their tensor-parallel groups make a *data-parallel group*:
they hold the same weights, and compute different sequences. Example, W = 4, T = 2: tensor-parallel groups (0 1) (2 3),
data-parallel groups (0 2) (1 3).

A program that trains calls `start` after torch.distributed has been initialized; one that only computes (export, tests)
calls `start_alone`, which makes a group of one. The groups themselves are megatron-core's (0.16.1).

`local_shard` leads from a whole parameter to the shard of each rank, `gathered` back. Of T ranks, rank r holds
- *rows*: the r-th of T equal parts of its rows. Heads stand group by group in `linear_qkv` (the queries of a kv head,
  its key, its value), so that equal parts are whole groups;
- *gated rows*: of `linear_fc1` = [gate; up] the r-th part of the gate's rows, then the r-th part of up's;
- *columns*: the r-th of T equal parts of its columns, which multiply the part of the input that the rank computed;
- all of it, where it is *replicated*: norms, learned positions, relative position biases, routers and experts, and
  biases that are added once to a sum.

A checkpoint holds whole parameters, and so does not depend on T. Source of the layout: megatron/core/tensor_parallel/
layers.py and transformer/mlp.py (0.16.1; the gated one's `stride`). Example, T = 2: rows [a b c d] are [a b] and [c d];
gated rows [g0 g1 u0 u1] are [g0 u0] and [g1 u1].
"""

import os
from collections.abc import Callable

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from zerokara.base.resources import network_environment
from zerokara.model.megatron_core import parallel_state, prepare_device
from zerokara.model.shapes import Partition


def start(seed: int, tensor_parallel_size: int = 1) -> None:
    """Set up the groups; every process passes the same seed. `tensor_parallel_size` must divide the processes."""
    if parallel_state.model_parallel_is_initialized() and tensor_size() != tensor_parallel_size:
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel_size,
            create_gloo_process_groups=False,  # for megatron-core's own checkpoints, which are not used
        )
    prepare_device(seed)


def start_alone() -> None:
    """Set up groups of one, in a process that is not part of a training run."""
    if not torch.distributed.is_initialized():
        os.environ.update(network_environment())
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    start(seed=0)


data_rank: Callable[[], int] = parallel_state.get_data_parallel_rank
data_size: Callable[[], int] = parallel_state.get_data_parallel_world_size
"""All processes over `tensor_size`."""
data_group: Callable[[], ProcessGroup] = parallel_state.get_data_parallel_group
"""The processes that hold the same weights and compute different sequences: sums over the data run here."""
tensor_rank: Callable[[], int] = parallel_state.get_tensor_model_parallel_rank
tensor_size: Callable[[], int] = parallel_state.get_tensor_model_parallel_world_size
"""Processes that together hold one model."""
tensor_group: Callable[[], ProcessGroup] = parallel_state.get_tensor_model_parallel_group
"""The processes that together hold one model and compute the same sequences."""


def local_shard(whole: Tensor, partition: Partition | None) -> Tensor:
    """The shard of a whole parameter that this process holds."""
    size = tensor_size()
    if size == 1 or not partition:
        return whole
    dim, blocks = partition
    return torch.cat([block.chunk(size, dim)[tensor_rank()] for block in whole.chunk(blocks, dim)], dim)


def gathered(shard: Tensor, partition: Partition | None) -> Tensor:
    """A whole parameter (or a tensor of its shape) from all ranks' shards; every rank of the group must call it."""
    if tensor_size() == 1 or not partition:
        return shard
    shard, (dim, blocks) = shard.contiguous(), partition
    shards = [torch.empty_like(shard) for _ in range(tensor_size())]
    torch.distributed.all_gather(shards, shard, group=tensor_group())
    return torch.cat([each.chunk(blocks, dim)[block] for block in range(blocks) for each in shards], dim)
