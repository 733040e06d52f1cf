"""Which processes share the matrices of each layer, and which share out the data.

Of W processes, T = tensor_parallel_size that follow each other make a *tensor group*: together they hold one model, and
read the same sequences. Processes with the same place in their tensor groups make a *data group*: they hold the same
weights, and read different sequences. Example, W = 4, T = 2: tensor groups (0 1) (2 3), data groups (0 2) (1 3).

A program that trains calls `start` after DeepSpeed has set torch.distributed up; one that only computes (export,
tests) calls `start_alone`, which makes a group of one. The groups themselves are megatron-core's (0.16.1).
"""

from __future__ import annotations

import os

import zerokara.model.import_megatron  # noqa: F401  # before megatron-core

# isort: split
import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random
from torch.distributed import ProcessGroup

from zerokara.model import cpu, loopback


def start(seed: int, tensor_parallel_size: int = 1) -> None:
    """Set up the groups; every process has the same seed. `tensor_parallel_size` must divide the processes."""
    cpu.prepare()
    if parallel_state.model_parallel_is_initialized() and tensor_size() != tensor_parallel_size:
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel_size,
            create_gloo_process_groups=False,  # of megatron-core's own checkpoints, which are not used
        )
    # Without a GPU there is no generator per device to fork: the inference tracker's fork is a no-op
    # (megatron/core/tensor_parallel/random.py, InferenceCudaRNGStatesTracker). Dropout is 0, so nothing is drawn.
    megatron_random.initialize_rng_tracker(inference_rng_tracker=not torch.cuda.is_available())
    if torch.cuda.is_available():
        megatron_random.model_parallel_cuda_manual_seed(seed)


def start_alone(seed: int = 0) -> None:
    """As `start`, in a process that is not part of a training run."""
    if not torch.distributed.is_initialized():
        os.environ.update(loopback.environment())
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    start(seed)


def data_rank() -> int:
    """The place of this process among those that share out the data."""
    return int(parallel_state.get_data_parallel_rank())


def data_size() -> int:
    """How many processes share out the data: all of them over `tensor_size`."""
    return int(parallel_state.get_data_parallel_world_size())


def data_group() -> ProcessGroup:
    """The processes that hold the same weights and read different sequences: sums over the data run here."""
    return parallel_state.get_data_parallel_group()


def tensor_rank() -> int:
    """The place of this process among those that together hold one model."""
    return int(parallel_state.get_tensor_model_parallel_rank())


def tensor_size() -> int:
    """How many processes together hold one model."""
    return int(parallel_state.get_tensor_model_parallel_world_size())


def tensor_group() -> ProcessGroup:
    """The processes that together hold one model and read the same sequences."""
    return parallel_state.get_tensor_model_parallel_group()


class ModelParallelUnit:
    """The groups by the names that DeepSpeed (0.19.8, utils/groups.py) asks its `mpu` for.

    It asks for get_model_parallel_* where megatron-core says get_tensor_model_parallel_*. DeepSpeed keeps the first
    unit that it is given for the whole process; so this one answers for the groups of the moment.
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
        """The first process of the tensor group, by its number among all."""
        return int(parallel_state.get_tensor_model_parallel_src_rank())

    @staticmethod
    def get_data_parallel_group_ranks() -> list[int]:
        """The data group, by their numbers among all processes."""
        return torch.distributed.get_process_group_ranks(data_group())
