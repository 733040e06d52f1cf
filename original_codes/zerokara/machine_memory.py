"""Main memory of the machine, as far as this process may use it: the one place that asks the system.

What counts is the least of three: the machine's memory, the limits of the control groups that this process is in
(containers, Slurm, systemd), and the process's own limit (`ulimit -v`).
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(num_processes: int = 1) -> int:
    """Bytes that so many processes, started from this one, may still take together."""
    shared = [psutil.virtual_memory().available, *(limit - used for limit, used in _group_limits())]
    if (own := _process_limit()) is not None:
        shared.append(num_processes * (own - psutil.Process().memory_info().vms))
    return max(0, min(shared))


def installed_bytes(num_processes: int = 1) -> int:
    """Bytes that so many processes could take together if nothing else ran on this machine."""
    shared = [psutil.virtual_memory().total, *(limit for limit, _ in _group_limits())]
    if (own := _process_limit()) is not None:
        shared.append(num_processes * own)
    return min(shared)


def control_groups() -> Iterator[Path]:
    """The folders of the control groups (version 2) that this process is in, the innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    inner = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if inner is None:
        return
    folder = _CGROUPS / inner
    yield from (group for group in [folder, *folder.parents] if group == _CGROUPS or _CGROUPS in group.parents)


def _process_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _group_limits() -> Iterator[tuple[int, int]]:
    """The limit of each control group that has one, and the bytes in use that cannot simply be dropped."""
    files = [(group / "memory.max", group / "memory.current", group / "memory.stat") for group in control_groups()]
    version_1 = _CGROUPS / "memory"
    files.append((version_1 / "memory.limit_in_bytes", version_1 / "memory.usage_in_bytes", version_1 / "memory.stat"))
    for limit_file, used_file, statistics in files:
        try:
            limit = limit_file.read_text(encoding="utf-8").strip()
            used = int(used_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # the root group has no limit, nor has one without the memory controller
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
