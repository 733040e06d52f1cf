"""Memory and cores that this process may use: of the machine, of its control groups, and by its own limits.

A container or a Slurm job has less than the machine shows; Linux keeps these limits in control groups
(https://docs.kernel.org/admin-guide/cgroup-v2.html), and those of version 1 at a fixed path.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_MEMORY_V1 = _CGROUPS / "memory"
"""The control group of a container, in version 1."""


def available_memory(num_processes: int = 1) -> int:
    """Bytes that so many processes, started from this one, may still take together."""
    limits = [psutil.virtual_memory().available, *(limit - used for limit, used in _memory_limits())]
    if (own := _process_limit()) is not None:
        limits.append(num_processes * (own - psutil.Process().memory_info().vms))
    return max(0, min(limits))


def total_memory(num_processes: int = 1) -> int:
    """Bytes that so many processes could take together if nothing else ran on the machine."""
    limits = [psutil.virtual_memory().total, *(limit for limit, _ in _memory_limits())]
    if (own := _process_limit()) is not None:
        limits.append(num_processes * own)
    return min(limits)


def available_cores() -> int:
    """Cores that this process may run on (taskset, Slurm), and no more than its control groups give it the time of."""
    return max(1, min([len(os.sched_getaffinity(0)), *_core_quotas()]))


def num_oom_kills() -> int | None:
    """Processes that the kernel has killed for lack of memory, here (control group) or on the machine; None if unknown.

    Source: ``oom_kill`` in memory.events and /proc/vmstat.
    """
    for path in (*(folder / "memory.events" for folder in control_groups()), Path("/proc/vmstat")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def control_groups() -> Iterator[Path]:
    """The control groups (version 2) that this process is in, the innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    inner = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if inner is None:
        return
    folder = _CGROUPS / inner
    yield from (parent for parent in [folder, *folder.parents] if parent == _CGROUPS or _CGROUPS in parent.parents)


def _process_limit() -> int | None:
    """This process's own limit on its memory (`ulimit -v`), in bytes; None without one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Limit of each control group that has one, and the bytes in use that cannot simply be dropped."""
    files = [(group / "memory.max", group / "memory.current", group / "memory.stat") for group in control_groups()]
    version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    files.append(tuple(_MEMORY_V1 / name for name in version_1))  # type: ignore[arg-type]
    for limit_file, used_file, statistics in files:
        try:
            limit = limit_file.read_text(encoding="utf-8").strip()
            used = int(used_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # the root has no limit, nor has a group without the memory controller
            continue
        if limit != "max":
            yield int(limit), used - _file_cache(statistics)


def _file_cache(statistics: Path) -> int:
    """Bytes of file cache that the kernel drops before it refuses memory: reading a large file fills it."""
    try:
        lines = statistics.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _core_quotas() -> Iterator[int]:
    """Whole cores whose time each control group (version 2) may take, where it has a limit."""
    for folder in control_groups():
        try:
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            yield int(quota) // int(period)
