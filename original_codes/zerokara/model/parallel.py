"""Tensor-parallel groups, whose processes share the matrices of each layer, and data-parallel groups.

Of W processes, T = tensor_parallel_size consecutive ones make a *tensor-parallel group*: together they hold one model,
and compute the same sequences. Processes of equal rank in their tensor-parallel groups make a *data-parallel group*:
they hold the same weights, and compute different sequences. Example, W = 4, T = 2: tensor-parallel groups (0 1) (2 3),
data-parallel groups (0 2) (1 3).

A program that trains calls `start` after torch.distributed has been initialized; one that only computes (export, tests)
calls `start_alone`, which makes a group of one. The groups themselves are megatron-core's (0.16.1).
"""

from __future__ import annotations

import os

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from zerokara.model import loopback
from zerokara.model.megatron_core import parallel_state, prepare_device


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
    """As `start`, in a process that is not part of a training run."""
    if not torch.distributed.is_initialized():
        os.environ.update(loopback.environment())
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    start(seed=0)


def data_rank() -> int:
    """The data-parallel rank of this process."""
    return int(parallel_state.get_data_parallel_rank())


def data_size() -> int:
    """The data-parallel size: all processes over `tensor_size`."""
    return int(parallel_state.get_data_parallel_world_size())


def data_group() -> ProcessGroup:
    """The processes that hold the same weights and compute different sequences: sums over the data run here."""
    return parallel_state.get_data_parallel_group()


def tensor_rank() -> int:
    """The tensor-parallel rank of this process."""
    return int(parallel_state.get_tensor_model_parallel_rank())


def tensor_size() -> int:
    """The tensor-parallel size: how many processes together hold one model."""
    return int(parallel_state.get_tensor_model_parallel_world_size())


def tensor_group() -> ProcessGroup:
    """The processes that together hold one model and compute the same sequences."""
    return parallel_state.get_tensor_model_parallel_group()


class ModelParallelUnit:
    """The groups by the names that DeepSpeed (0.19.8, utils/groups.py) asks its `mpu` for.

    It asks for get_model_parallel_* where megatron-core says get_tensor_model_parallel_*. DeepSpeed keeps the first
    unit that it is given for the life of the process; so this one answers for the current groups.
    """

    get_model_parallel_rank = staticmethod(tensor_rank)
    get_model_parallel_world_size = staticmethod(tensor_size)
    get_model_parallel_group = staticmethod(tensor_group)
    get_tensor_model_parallel_rank = staticmethod(tensor_rank)
    get_tensor_model_parallel_world_size = staticmethod(tensor_size)
    get_tensor_model_parallel_group = staticmethod(tensor_group)
    get_data_parallel_rank = staticmethod(data_rank)
    get_data_parallel_world_size = staticmethod(data_size)
    get_data_parallel_group = staticmethod(data_group)

    @staticmethod
    def get_tensor_model_parallel_src_rank() -> int:
        """The global rank of the tensor-parallel group's first process."""
        return int(parallel_state.get_tensor_model_parallel_src_rank())

    @staticmethod
    def get_data_parallel_group_ranks() -> list[int]:
        """The global ranks of the data-parallel group."""
        return torch.distributed.get_process_group_ranks(data_group())
