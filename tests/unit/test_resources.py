"""Cores and the kernel's counter of killed processes, as control groups and limits give them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerokara import resources


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only control group of this process, still without limits."""
    monkeypatch.setattr(resources, "control_groups", lambda: iter([tmp_path]))
    return tmp_path


def limit(group: Path, **values: object) -> None:
    for name, value in values.items():
        (group / name.replace("_", ".")).write_text(f"{value}\n", encoding="utf-8")


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
