"""Joining the processes that the launcher started: this one's device, its threads, and its process groups."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed

from zerokara import progress
from zerokara.errors import RunError
from zerokara.model import parallel
from zerokara.training.compute import devices
from zerokara.training.planning import cores
from zerokara.training.processes import authentication, rendezvous

ANSWER_SECONDS = 60
"""How long a process may take to answer before it is named."""
TIMEOUT = datetime.timedelta(minutes=30)
"""How long a collective waits for the slowest process: one may be hashing a checkpoint, or waiting for the disk."""


@dataclass(frozen=True)
class Processes:
    """The joined processes of a run, as one of them sees them."""

    device: torch.device
    """What this process computes on."""
    rank: int
    """This process among all."""

    @property
    def is_first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def log(self, text: str) -> None:
        """Print a line, once for all processes."""
        if self.is_first:
            progress.log(text)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum numbers over all processes; every process must call it.

        In float64: a count of tokens or a sum of nats over a large batch has more digits than float32.
        """
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def max(self, value: float) -> float:
        """Return the largest of a number over all processes; every process must call it."""
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return float(found.item())

    def from_first(self, value: int) -> int:
        """Return the first process's number; every process must call it."""
        found = torch.tensor(value, device=self.device)
        torch.distributed.broadcast(found, src=0)
        return int(found.item())


def join(num_processes: int, tensor_parallel_size: int, seed: int, keeps_freed_memory: bool) -> Processes:
    """Take a device, initialise torch.distributed, and form the process groups.

    `keeps_freed_memory` is for a process on a CPU that has room: see `devices.keep_freed_memory`.

    Raises:
        RunError: a process did not answer, or is not part of this run.
    """
    device = devices.local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(cores.threads(num_processes))
        if keeps_freed_memory:
            devices.keep_freed_memory()
        else:
            devices.give_back_freed_memory()
    init_process_group(device)
    require_answers()
    parallel.start(seed, tensor_parallel_size)
    authentication.authenticate(ANSWER_SECONDS)
    return Processes(device, torch.distributed.get_rank())


def init_process_group(device: torch.device) -> None:
    """Join the processes that the launcher started (RANK, WORLD_SIZE), at the `rendezvous`; once only.

    Without one at MASTER_ADDR and MASTER_PORT, as torchrun has it. A lone process opens no port.
    """
    if torch.distributed.is_initialized():
        return
    is_cuda = device.type == "cuda"
    backend = "nccl" if is_cuda else "gloo"
    if os.environ.get("WORLD_SIZE") == "1":
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
        return
    torch.distributed.init_process_group(
        backend,
        init_method=rendezvous.init_method() or "env://",
        timeout=TIMEOUT,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        device_id=device if is_cuda else None,
    )


def require_answers() -> None:
    """Check that all processes are running and reach each other; every process must call it.

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
        message = str(error).strip().splitlines()[0]
        raise RunError(
            f"not all {torch.distributed.get_world_size()} processes answered within {ANSWER_SECONDS} s: {message}. "
            "See what these processes printed, and whether they run at all"
        ) from error
    torch.distributed.destroy_process_group(group)
