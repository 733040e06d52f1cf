"""What this process has of its machine: memory and cores, by the machine, its control groups and its own limits; and
its parent, with whom it ends.

A container or a Slurm job has less than the machine shows; Linux keeps these limits in control groups
(https://docs.kernel.org/admin-guide/cgroup-v2.html), and those of version 1 at a fixed path.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


def available_memory(num_processes: int = 1) -> int:
    """Bytes that so many processes, started from this one, may still take together."""
    limits = [psutil.virtual_memory().available, *(limit - used for limit, used in _memory_limits())]
    own, _ = resource.getrlimit(resource.RLIMIT_AS)  # ulimit -v
    if own != resource.RLIM_INFINITY:
        limits.append(num_processes * (own - psutil.Process().memory_info().vms))
    return max(0, min(limits))


def total_memory(num_processes: int = 1) -> int:
    """Bytes that so many processes could take together if nothing else ran on the machine."""
    limits = [psutil.virtual_memory().total, *(limit for limit, _ in _memory_limits())]
    own, _ = resource.getrlimit(resource.RLIMIT_AS)
    if own != resource.RLIM_INFINITY:
        limits.append(num_processes * own)
    return min(limits)


def available_cores() -> int:
    """Cores that this process may run on (taskset, Slurm), and no more than its control groups give it the time of."""
    quotas = []
    for folder in control_groups():
        try:
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            quotas.append(int(quota) // int(period))
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def control_groups() -> Iterator[Path]:
    """The control groups (version 2) that this process is in, the innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for inner in [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]:
        folder = _CGROUPS / inner
        yield from (parent for parent in [folder, *folder.parents] if parent.is_relative_to(_CGROUPS))


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Limit of each control group that has one, and the bytes in use that cannot simply be dropped."""
    places = [(group, "memory.max", "memory.current") for group in control_groups()]
    places.append((_CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))  # a container's, version 1
    for group, limit_name, used_name in places:
        try:
            limit = (group / limit_name).read_text(encoding="utf-8").strip()
            used = int((group / used_name).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # the root has no limit, nor has a group without the memory controller
            continue
        if limit != "max":
            yield int(limit), used - _file_cache(group / "memory.stat")


def _file_cache(statistics: Path) -> int:
    """Bytes of file cache that the kernel drops before it refuses memory: reading a large file fills it."""
    try:
        lines = statistics.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def end_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Ask for signal `number` when the parent, whose process id is `parent_pid`, dies; call it first in the child.

    However it dies (`kill -9` as well): see prctl(2). Elsewhere than on Linux the child ends when its work does.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # It died before the request.
        os._exit(1)
