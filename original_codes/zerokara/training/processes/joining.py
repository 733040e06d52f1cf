"""Joining the processes of a run: this one's device, its threads, its process groups, and who is in them."""

from __future__ import annotations

import ctypes
import datetime
import functools
import hmac
import itertools
import os
import resource
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import AllToAllOptions, FileStore, PrefixStore, ProcessGroup, Store, TCPStore, distributed_c10d

from zerokara import progress
from zerokara.errors import RunError
from zerokara.model import parallel
from zerokara.training.planning import processors
from zerokara.training.processes import rendezvous

HEARTBEAT_SECONDS = 20.0
"""Between two signs of life of the first process, while the others wait for it."""
_message_stores = itertools.count()
_WORKING, _DONE, _FAILED = range(3)
ANSWER_SECONDS = 60
"""How long a process may take to answer before it is named."""
TIMEOUT = datetime.timedelta(minutes=30)
"""How long a collective waits for the slowest process, in every group; what may take longer has a heartbeat
(`Processes.from_first`)."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Source: glibc's malloc.h."""
_PROOF_BYTES = 32
"""Length of a keyed hash: SHA-256."""


@dataclass(frozen=True)
class Processes:
    """The joined processes of a run, as one of them sees them."""

    device: torch.device
    """What this process computes on."""
    rank: int
    """This process among all."""
    host_group: ProcessGroup | None = None
    """All processes, for numbers in main memory: nobody waits for a device. None is the default group, of gloo."""

    @property
    def count(self) -> int:
        """How many they are."""
        return torch.distributed.get_world_size()

    @property
    def is_first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def log(self, text: str) -> None:
        """Print a line, once for all processes."""
        if self.is_first:
            progress.log(text)

    def message_store(self, name: str) -> Store:
        """A new store in which processes leave messages for each other; all of them ask for the same ones in turn.

        With a connection of its own: a thread may wait there, while the training waits elsewhere. New, since processes
        may train one run after another, and messages stay.
        """
        name = f"{name}/{next(_message_stores)}"
        return PrefixStore(name, distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum numbers over all processes; every process must call it.

        In float64: a count of tokens or a sum of nats over a large batch has more digits than float32.
        """
        total = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(total, group=self.host_group)
        return [float(value) for value in total.tolist()]

    def sum_on_device(self, numbers: Tensor) -> Tensor:
        """Sum numbers of the device over all processes, in place; every process must call it."""
        torch.distributed.all_reduce(numbers)
        return numbers

    def max(self, value: float) -> float:
        """Return the largest of a number over all processes; every process must call it."""
        found = torch.tensor(value, dtype=torch.float64)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self.host_group)
        return float(found.item())

    def numbers_of_all(self, number: int) -> list[int]:
        """Every process's number, by rank; every process must call it."""
        found = [torch.zeros((), dtype=torch.int64) for _ in range(self.count)]
        torch.distributed.all_gather(found, torch.tensor(number), group=self.host_group)
        return [int(each) for each in found]

    def text_of(self, source: int, text: str | None) -> str:
        """The text of the process `source`, in all; every process must call it."""
        content = list((text or "").encode())
        size = torch.tensor(len(content))
        torch.distributed.broadcast(size, src=source, group=self.host_group)
        sent = (
            torch.tensor(content, dtype=torch.uint8)
            if self.rank == source
            else torch.empty(int(size), dtype=torch.uint8)
        )
        torch.distributed.broadcast(sent, src=source, group=self.host_group)
        return bytes(sent.tolist()).decode()

    def from_first(self, work: Callable[[], int]) -> int:
        """Call `work` in the first process, and return its number in all; every process must call it.

        It may take hours (hashing a checkpoint, waiting for a disk): the first process tells the others every
        `HEARTBEAT_SECONDS` that it is alive. Where `work` fails, the others exit with a failure's code.
        """
        answer, error = 0, None
        finished = threading.Event()

        def call() -> None:
            nonlocal answer, error
            try:
                answer = work()
            except BaseException as raised:
                error = raised
            finished.set()

        if self.is_first:
            threading.Thread(target=call, name="work of the first process", daemon=True).start()
        state = _WORKING
        while state == _WORKING:
            if self.is_first and finished.wait(HEARTBEAT_SECONDS):
                state = _FAILED if error else _DONE
            heard = torch.tensor([state, answer if state == _DONE else 0])
            torch.distributed.broadcast(heard, src=0, group=self.host_group)
            state, found = heard.tolist()
        if error:
            raise error
        if state == _FAILED:
            raise SystemExit(RunError.exit_code)
        return int(found)


def join(processes_here: int, tensor_parallel_size: int, seed: int, keeps_freed_memory: bool) -> Processes:
    """Take a device, initialise torch.distributed, and form the process groups.

    `processes_here` share this machine's cores. `keeps_freed_memory` is for a process on a CPU that has room: see
    `keep_freed_memory`.

    Raises:
        RunError: a process did not answer, or is not part of this run.
    """
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory(keeps_freed_memory)
    # On a GPU too: initial weights are drawn, and under offload weights updated, by the cores.
    torch.set_num_threads(processors.threads(processes_here))
    init_process_group(device)
    # NCCL's collectives are the device's, and its time-out says nothing of who is missing.
    host_group = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT) if device.type == "cuda" else None
    require_answers(host_group)
    parallel.start(seed, tensor_parallel_size)
    set_timeouts()
    authenticate(ANSWER_SECONDS)
    return Processes(device, torch.distributed.get_rank(), host_group)


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
    address = rendezvous.store_address()
    torch.distributed.init_process_group(
        backend,
        init_method=None if address else rendezvous.init_method() or "env://",
        store=_store_at(*address) if address else None,
        timeout=TIMEOUT,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        device_id=device if is_cuda else None,
    )


def _store_at(host: str, port: int, attempt: str) -> Store:
    """The store that the first of several machines holds; each start of the processes has keys of its own there."""
    return PrefixStore(f"processes/{attempt}", TCPStore(host, port, is_master=False, timeout=TIMEOUT))


def set_timeouts() -> None:
    """Set `TIMEOUT` in every process group that there is: libraries make some with torch's own, 10 minutes for NCCL."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(TIMEOUT, group)


def require_answers(host_group: ProcessGroup | None = None) -> None:
    """Check that all processes of a gloo group are running and reach each other; every process must call it.

    Raises:
        RunError: some did not answer within `ANSWER_SECONDS`; the first process names them.
    """
    if torch.distributed.get_world_size() == 1:
        return
    deadline = datetime.timedelta(seconds=ANSWER_SECONDS)
    try:
        torch.distributed.monitored_barrier(host_group, timeout=deadline, wait_all_ranks=True)
    except RuntimeError as error:
        message = str(error).strip().splitlines()[0]
        raise RunError(
            f"not all {torch.distributed.get_world_size()} processes answered within {ANSWER_SECONDS} s: {message}. "
            "See what these processes printed, and whether they run at all"
        ) from error


def authenticate(within_seconds: float) -> None:
    """Authenticate the processes of all gloo groups to each other; every process must call it.

    gloo trusts whoever connects to its ports first, and every user of the machine can connect. So once a group has its
    connections, and before anything is computed with them, each process sends each other one a keyed hash of the group,
    of itself and of the other, with a key that only the processes of this `rendezvous` share. NCCL does as much by
    itself: its peers show a random number that they read from the store (NCCL 2.29, bootstrap.cc). Does nothing in
    processes without a rendezvous.

    Raises:
        RunError: some process did not prove within `within_seconds` that it is part of this run.
    """
    key = shared_key()
    if key is None:
        return
    for group in list(distributed_c10d._world.pg_map):
        if torch.distributed.get_backend(group) == "gloo" and group.size() > 1:
            _authenticate(group, key, datetime.timedelta(seconds=within_seconds))


@functools.cache
def shared_key() -> bytes | None:
    """A random number that the processes of a rendezvous share, and nobody else knows; None without a rendezvous."""
    method = rendezvous.init_method()
    if method is None:
        return None
    store = FileStore(method.removeprefix("file://"), int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        store.set("zerokara_key", secrets.token_hex())
    return bytes(store.get("zerokara_key"))


def _authenticate(group: ProcessGroup, key: bytes, deadline: datetime.timedelta) -> None:
    ranks = torch.distributed.get_process_group_ranks(group)
    own = torch.distributed.get_rank()
    sent = torch.tensor(list(b"".join(_proof(key, group, own, other) for other in ranks)), dtype=torch.uint8)
    received = torch.zeros_like(sent)
    options = AllToAllOptions()
    options.timeout = deadline  # torch.distributed.all_to_all_single would wait for as long as the group does
    try:
        group.alltoall_base(received, sent, [], [], options).wait()
    except RuntimeError as error:
        raise _failure("some process", f"did not answer within {deadline.total_seconds():g} s") from error
    for other, proof in zip(ranks, received.split(_PROOF_BYTES), strict=True):
        if not hmac.compare_digest(bytes(proof.tolist()), _proof(key, group, other, own)):
            raise _failure(f"process {other}", "did not prove that it is part of this run")


def _proof(key: bytes, group: ProcessGroup, sender: int, receiver: int) -> bytes:
    return hmac.digest(key, f"{group.group_name} {sender} {receiver}".encode(), "sha256")


def _failure(who: str, what: str) -> RunError:
    return RunError(
        f"{who} {what}: another program on this machine may have connected in its place. Nothing was computed; start "
        "again, and if it happens again, ask who else uses this machine"
    )


def local_device() -> torch.device:
    """The device of this process, by LOCAL_RANK."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def gpu_memory(device: torch.device) -> int | None:
    """Bytes of a GPU's memory; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held so far: of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keep_freed_memory(keeps: bool) -> None:
    """On a CPU, let freed memory stay with this process for its next tensor, as torch does on a GPU, or give it back.

    glibc gives large pieces back at once; to get them again the system clears each page, which for a tensor takes as
    long as a pass over it, or ten: a training step of 40M parameters took 1.4 times as long. The price of keeping is
    holes that nothing fills, a third more memory there. Elsewhere than with glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        if keeps:
            mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_MMAP_THRESHOLD, 2**30 if keeps else 2**20)
