"""Processes of a run: the device, the threads and the process groups of this one, and who shares its run folder."""

import contextlib
import ctypes
import datetime
import functools
import itertools
import os
import resource
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import FileStore, HashStore, PrefixStore, ProcessGroup, Store, TCPStore, distributed_c10d

from zerokara.base import progress
from zerokara.base.errors import RunError
from zerokara.model import parallel
from zerokara.training.planning import processors
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes import supervision

POLL_SECONDS = 0.02  # between two looks for a message
_message_stores = itertools.count()
TIMEOUT = datetime.timedelta(minutes=30)
"""Time that a collective waits for the slowest process, in every group; `Processes.from_one` waits for longer."""


@dataclass(frozen=True)
class Processes:
    """The joined processes of a run, as one of them sees them."""

    device: torch.device
    rank: int
    host_group: ProcessGroup | None = None
    """All processes, for numbers in main memory: nobody waits for a device. None is the default group, of gloo."""

    @property
    def is_first(self) -> bool:
        """True if this process speaks and writes for all."""
        return self.rank == 0

    @functools.cached_property
    def folder_ranks(self) -> tuple[int, ...]:
        """Ranks that see the same run folder as this process, by `FOLDER_NAME`. At first every process must ask.

        Machines may share a disk or each have their own. Those of a folder write one checkpoint, a share each. So each
        folder gets a whole one, every machine that is left can resume, and one that lacks it (it is new, or its disk
        was full) gets the tensors from one that has it.
        """
        folders = self.numbers_of_all(int(os.environ.get(supervision.FOLDER_NAME, "0")))
        return tuple(rank for rank, folder in enumerate(folders) if folder == folders[self.rank])

    @property
    def leads(self) -> bool:
        """True if this process speaks for its run folder."""
        return self.folder_ranks[0] == self.rank

    def log(self, text: str) -> None:
        """Print a line, once for all processes."""
        if self.is_first:
            progress.log(text)

    def log_from_folder(self, text: str) -> None:
        """Print a line from each process that `leads`; those of other machines with their names."""
        if self.leads:
            progress.log(text if self.is_first else f"{socket.gethostname()}: {text}")

    def message_store(self, name: str) -> Store:
        """Open a new store in which processes leave messages for each other; all must open the same ones in turn."""
        name = f"{name}/{next(_message_stores)}"  # messages stay, and processes may train one run after another
        # A connection of its own, in which a thread may wait.
        return PrefixStore(name, distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum numbers over all processes; every process must call it."""
        total = torch.tensor(values, dtype=torch.float64)  # a count of tokens has more digits than float32
        torch.distributed.all_reduce(total, group=self.host_group)
        return [float(value) for value in total.tolist()]

    def numbers_of_all(self, number: float) -> list[float]:
        """Return each process's number, by rank; every process must call it."""
        return self.sum([number if rank == self.rank else 0 for rank in range(torch.distributed.get_world_size())])

    def from_one(self, work: Callable[[], str], rank: int = 0) -> str:
        """Call `work` in the process `rank`, and return its text in all; every process must call it.

        It may take hours (hashing a checkpoint, waiting for a disk), for which no collective waits. So the others poll
        for a message as long as their launcher lives, and otherwise for `TIMEOUT`. Where `work` fails, they exit, too.
        """
        store = self.message_store("from one")
        if self.rank == rank:
            try:
                text = work()
            except BaseException:
                store.set("failed", "")
                raise
            store.set("text", text)
            return text
        launcher = os.environ.get(processors.PARENT_NAME, str(os.getppid()))
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while not store.check(["text"]):
            if str(os.getppid()) == launcher:
                deadline = time.monotonic() + TIMEOUT.total_seconds()
            if store.check(["failed"]) or time.monotonic() > deadline:
                raise SystemExit(RunError.exit_code)
            time.sleep(POLL_SECONDS)
        return str(store.get("text").decode())


def join(plan: RunPlan) -> Processes:
    """Become one of the processes of a run: take a device, and form the process groups."""
    device, config = local_device(), plan.resolved
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # torch takes it first
    else:
        keep_freed_memory(plan.memory.can_keep_freed_memory)
    # On a GPU too: initial weights are drawn, and under offload weights updated, by the cores.
    torch.set_num_threads(processors.threads(plan.processes_per_node))
    init_process_group(device)
    # NCCL's collectives are the device's, and its time-out says nothing of who is missing.
    host_group = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT) if device.type == "cuda" else None
    parallel.start(config.seed, config.tensor_parallel_size)
    set_timeouts()
    return Processes(device, torch.distributed.get_rank(), host_group)


def init_process_group(device: torch.device) -> None:
    """Join the processes that the launcher started (RANK, WORLD_SIZE), at their rendezvous; once only."""
    if torch.distributed.is_initialized():
        return
    is_cuda, count = device.type == "cuda", int(os.environ["WORLD_SIZE"])
    # No `device_id`: with it NCCL connects all of some hundred groups at once, of which three are used. Without it a
    # barrier warns that it uses the device of `set_device`.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")
    torch.distributed.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=HashStore() if count == 1 else rendezvous_store(),
        timeout=TIMEOUT,
        rank=0 if count == 1 else int(os.environ["RANK"]),
        world_size=count,
    )


@functools.cache
def rendezvous_store() -> Store:
    """Open the store at which the processes of a run meet.

    A file stays open from here on and outlives the process that made it: should that one be killed, the training
    processes still save.
    """
    place, *port_and_start = os.environ[supervision.RENDEZVOUS_NAME].split()
    if port_and_start:  # at the first of several machines
        port, start = port_and_start
        return PrefixStore(f"processes/{start}", TCPStore(place, int(port), is_master=False, timeout=TIMEOUT))
    store = FileStore(f"/proc/self/fd/{os.open(place, os.O_RDWR)}")
    store.set_timeout(TIMEOUT)
    return store


def set_timeouts() -> None:
    """Set `TIMEOUT` in every process group: libraries make groups with torch's own, 10 minutes for NCCL."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(TIMEOUT, group)


def local_device() -> torch.device:
    """Return the device of this process, by LOCAL_RANK."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process so far: of the GPU's memory, or of the machine's.

    On a GPU what torch has reserved, which nobody else can have: tensors and the holes between them.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keep_freed_memory(keeps: bool) -> None:
    """On a CPU, let freed memory stay with this process for its next tensor, as torch does on a GPU, or give it back.

    glibc gives large pieces back at once; to get them again the system clears each page, which for a tensor takes as
    long as a pass over it, or ten: a training step of 40M parameters took 1.4 times as long. The price of keeping is
    holes that nothing fills, a third more memory there. Elsewhere than with glibc nothing happens.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        if keeps:
            mallopt(-1, -1)  # M_TRIM_THRESHOLD; source: glibc's malloc.h
        mallopt(-3, 2**30 if keeps else 2**20)  # M_MMAP_THRESHOLD
