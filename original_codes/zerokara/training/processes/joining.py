"""Becoming one of the processes that the launcher started: its device, its threads, and the groups it belongs to."""

from __future__ import annotations

import datetime

import torch
import torch.distributed

from zerokara.errors import RunError
from zerokara.model import parallel
from zerokara.training.compute import devices
from zerokara.training.compute.engine import init_distributed
from zerokara.training.planning import cores
from zerokara.training.planning.memory_forecast import MachineMemory
from zerokara.training.planning.preparation import Preparation
from zerokara.training.processes import identity, meeting

ANSWER_SECONDS = 60
"""How long a process may take to answer before it is named."""


def join(preparation: Preparation, device: torch.device) -> None:
    """Take `device`, meet the other processes, and form the groups.

    Raises:
        RunError: a process did not answer, or is none of this run.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(cores.threads(preparation.num_processes))
        available = MachineMemory.available(preparation.num_processes, None)
        if preparation.memory_forecast(available).can_keep_freed_memory:
            devices.keep_freed_memory()
        else:
            devices.give_back_freed_memory()
    init_distributed(device.type, meeting.init_method())
    require_answers()
    parallel.start(preparation.config.seed, preparation.config.tensor_parallel_size)
    identity.prove(ANSWER_SECONDS)


def require_answers() -> None:
    """See that all processes are there and hear each other; every process must call it.

    Raises:
        RunError: some did not answer within `ANSWER_SECONDS`; the first process names them.
    """
    if torch.distributed.get_world_size() == 1:
        return
    deadline = datetime.timedelta(seconds=ANSWER_SECONDS)
    # NCCL only waits; gloo's barrier knows who is missing.
    group = torch.distributed.new_group(backend="gloo", timeout=deadline)
    try:
        torch.distributed.monitored_barrier(group, timeout=deadline, wait_all_ranks=True)
    except RuntimeError as error:
        said = str(error).strip().splitlines()[0]
        raise RunError(
            f"not all {torch.distributed.get_world_size()} processes answered within {ANSWER_SECONDS} s: {said}. See "
            "what these processes printed, and whether they run at all"
        ) from error
    torch.distributed.destroy_process_group(group)
