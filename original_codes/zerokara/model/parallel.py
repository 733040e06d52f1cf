"""The process groups that megatron-core asks for, over a torch.distributed that is already there or made here.

A program that trains calls `start` after DeepSpeed has set torch.distributed up; one that only computes (export,
tests) calls `start_alone`, which makes a group of one.
"""

from __future__ import annotations

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random

from zerokara.model import cpu


def start(seed: int) -> None:
    """Set up megatron-core's groups; every process has the same seed, for the weights are the same in all."""
    cpu.prepare()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    # Without a GPU there is no generator per device to fork: the inference tracker's fork is a no-op
    # (megatron/core/tensor_parallel/random.py, InferenceCudaRNGStatesTracker). Dropout is 0, so nothing is drawn.
    megatron_random.initialize_rng_tracker(inference_rng_tracker=not torch.cuda.is_available())
    if torch.cuda.is_available():
        megatron_random.model_parallel_cuda_manual_seed(seed)


def start_alone(seed: int = 0) -> None:
    """As `start`, in a process that is not part of a training run."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    start(seed)
