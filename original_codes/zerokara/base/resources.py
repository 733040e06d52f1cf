"""Memory, cores, disk and network interface of this process, and the end of its parent. Needs no torch.

A container or a Slurm job has less than the machine shows; Linux keeps these limits in control groups
(https://docs.kernel.org/admin-guide/cgroup-v2.html), and those of version 1 at a fixed path.
"""

import ctypes
import errno
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import psutil

from zerokara.base.errors import Fault, UserError

_CGROUPS = Path("/sys/fs/cgroup")


def available_memory(num_processes: int = 1) -> int:
    """Return the bytes that processes started from this one may still take together."""
    unused = (limit - used for limit, used in _memory_limits(num_processes))
    return max(0, min([psutil.virtual_memory().available, *unused]))


def total_memory(num_processes: int = 1) -> int:
    """Return the bytes that processes could take together if nothing else ran on the machine."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _memory_limits(num_processes))])


def available_cores() -> int:
    """Return the cores that this process may run on (taskset, Slurm), at most the quota of its control groups."""
    quotas = [content(group / "cpu.max").split() for group in control_groups()]
    allowed = [int(quota[0]) // int(quota[1]) for quota in quotas if quota and quota[0] != "max"]
    return max(1, min([len(os.sched_getaffinity(0)), *allowed]))


def free_bytes(path: Path) -> int:
    """Return the bytes that are free on the disk where `path` is, or will be."""
    place = path.absolute()
    return shutil.disk_usage(next(each for each in (place, *place.parents) if each.exists())).free


def control_groups() -> Iterator[Path]:
    """Yield the control groups (version 2) of this process, the innermost first."""
    for line in content(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::/"):
            group = _CGROUPS / line.removeprefix("0::/")
            yield from (parent for parent in [group, *group.parents] if parent.is_relative_to(_CGROUPS))


def _memory_limits(num_processes: int) -> Iterator[tuple[int, int]]:
    """Yield each limit for the processes together, and the bytes in use under it that cannot simply be dropped."""
    own, _ = resource.getrlimit(resource.RLIMIT_AS)  # ulimit -v
    if own != resource.RLIM_INFINITY:
        yield num_processes * own, num_processes * psutil.Process().memory_info().vms
    places = [(group, "memory.max", "memory.current") for group in control_groups()]
    places.append((_CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))  # a container's, version 1
    for group, limit_name, used_name in places:
        limit, used = content(group / limit_name).strip(), content(group / used_name)
        if used and limit.isdecimal():  # it may be "max"
            statistics = dict(line.split() for line in content(group / "memory.stat").splitlines())
            # File cache, which reading a large file fills, is dropped before memory is refused.
            yield int(limit), int(used) - int(statistics.get("inactive_file", 0))


def network_environment(address: str = "127.0.0.1") -> dict[str, str]:
    """Environment variables that bind gloo and NCCL to the interface of an address; what the user has set stays.

    Left to itself gloo listens on the address of the host's name and NCCL on the first interface that is not the
    loopback one: on the local network, where every machine can connect. The processes of one node need neither.

    Empty where no interface has it. NCCL needs sockets for its bootstrap only; on one node the data goes through
    NVLink, PCIe or shared memory all the same (NCCL's guide, NCCL_SOCKET_IFNAME). Its RAS service, which reports a
    job's health on further ports, is off.
    """
    interfaces = psutil.net_if_addrs().items()
    names = [name for name, has in interfaces if address in [each.address.partition("%")[0] for each in has]]
    if not names:
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": f"={names[0]}", "NCCL_RAS_ENABLE": "0"}
    return {variable: os.environ.get(variable) or value for variable, value in wanted.items()}


def content(path: Path) -> str:
    """Read a file of the kernel; empty where it has none (the root group has no limit)."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def end_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Ask for signal `number` when the parent dies, however it dies (prctl(2)); call it first in the child."""
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG, linux/prctl.h
    if os.getppid() != parent_pid:  # It died before the request.
        os._exit(1)


@contextmanager
def ended(pool: Executor) -> Iterator[None]:
    """Kill the workers of a pool and shut it down when the block ends. If a worker dies while the pool starts another,
    the pool by itself waits for the new one for ever, or closes the pipes that the new one needs."""
    others = {*multiprocessing.active_children()}
    try:
        yield
    except OSError as error:
        if error.errno != errno.EBADF and str(error) != "handle is closed":  # multiprocessing's own words
            raise
        from concurrent.futures.process import BrokenProcessPool  # ten milliseconds, which each step would wait

        raise BrokenProcessPool("a worker died") from error
    finally:
        for worker in {*multiprocessing.active_children()} - others:
            worker.kill()
        pool.shutdown(cancel_futures=True)


def start_fork_server(modules: Sequence[str]) -> ForkServerContext:
    """Start multiprocessing's fork server, which imports these modules; those that are not installed it passes over."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules])
    try:
        context.Lock()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT):
            raise
        remedy = "make it larger, or writable (docker run --shm-size=1g; mount -o remount,rw,size=1g /dev/shm)"
        raise UserError(Fault("/dev/shm", f"takes no semaphore: {error.strerror}", remedy=remedy)) from error
    # Ctrl-C reaches every process of a terminal's foreground group. It is meant for the step, which ends the others:
    # what is ignored here stays ignored in the server and in its workers.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    except OSError as error:
        if "AF_UNIX" not in str(error):  # a socket's path may have 107 bytes
            raise
        raise UserError(Fault("TMPDIR", "is too long", tempfile.gettempdir(), "set another: TMPDIR=/tmp")) from error
    finally:
        signal.signal(signal.SIGINT, previous)
    return context


def end_with_step() -> None:
    """End this process of a fork server as soon as the step is gone that asked for it.

    The kernel's parent-death signal does not serve here: the parent is the fork server, which outlives the step for as
    long as there are processes of it.
    """
    step = multiprocessing.parent_process()
    assert step is not None

    def end() -> None:
        step.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
