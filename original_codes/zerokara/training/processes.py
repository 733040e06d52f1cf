"""Becoming one of the processes that the launcher started: its device, its threads, and the groups it belongs to."""

from __future__ import annotations

import torch

from zerokara.model import parallel
from zerokara.training import devices
from zerokara.training.engine import init_distributed
from zerokara.training.preparation import Preparation, cpu_threads


def join(preparation: Preparation, device: torch.device) -> None:
    """Take `device`, meet the other processes, and form the groups."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(cpu_threads(preparation.num_processes))
        devices.keep_freed_memory()
    init_distributed(device.type)
    parallel.start(preparation.config.seed, preparation.config.tensor_parallel_size)
