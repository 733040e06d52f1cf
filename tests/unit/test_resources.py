"""Memory, cores and the kernel's counter of killed processes, as control groups and limits give them."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from zerokara import resources

GB = 10**9


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only control group of this process, still without limits."""
    monkeypatch.setattr(resources, "control_groups", lambda: iter([tmp_path]))
    return tmp_path


def limit(group: Path, **values: object) -> None:
    for name, value in values.items():
        (group / name.replace("_", ".")).write_text(f"{value}\n", encoding="utf-8")


def test_memory_is_the_least_that_any_group_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inner = tmp_path / "job"
    inner.mkdir()
    limit(tmp_path, memory_max="max", memory_current=0)
    limit(inner, memory_max=3 * GB, memory_current=2 * GB)
    monkeypatch.setattr(resources, "control_groups", lambda: iter([inner, tmp_path]))
    assert (resources.available_memory(), resources.total_memory()) == (GB, 3 * GB)


def test_groups_of_version_1_count(monkeypatch: pytest.MonkeyPatch, group: Path) -> None:
    monkeypatch.setattr(resources, "_MEMORY_V1", group)
    (group / "memory.limit_in_bytes").write_text(f"{2 * GB}\n", encoding="utf-8")
    (group / "memory.usage_in_bytes").write_text(f"{GB}\n", encoding="utf-8")
    assert (resources.available_memory(), resources.total_memory()) == (GB, 2 * GB)


def test_a_limit_of_this_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resources.total_memory() >= resources.available_memory() > GB
    monkeypatch.setattr(resource, "getrlimit", lambda _: (GB, GB))
    assert resources.available_memory() < GB == resources.total_memory()


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("300000 100000", 3), ("350000 100000", 3), ("50000 100000", 1), ("6400000 100000", 8)],
)
def test_cores_are_no_more_than_the_group_has_the_time_of(
    monkeypatch: pytest.MonkeyPatch, group: Path, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    limit(group, cpu_max=quota)
    assert resources.available_cores() == expected


def test_the_kernels_counter_is_read(group: Path) -> None:
    (group / "memory.events").write_text("low 0\noom 2\noom_kill 7\n", encoding="utf-8")
    assert resources.num_oom_kills() == 7
