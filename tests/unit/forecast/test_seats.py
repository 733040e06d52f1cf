from __future__ import annotations

import os

import pytest

from zerokara.forecast import seats as module
from zerokara.forecast.seats import Seat, makespan, seats


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(module, "available_cores", lambda: 8)
    monkeypatch.setattr(module, "available_memory", lambda: 100e9)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(("most", "number"), [(9, 8), (3, 3), (1, 1)])
@pytest.mark.usefixtures("eight_cores")
def test_the_cores_are_shared_out(most: int, number: int) -> None:
    found = seats(most, num_gpus=0)
    assert len(found) == number and not any(seat.environment for seat in found)
    assert sorted(core for seat in found for core in seat.cores) == list(range(8))


@pytest.mark.usefixtures("eight_cores")
def test_no_more_than_the_quota_and_the_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 5e9)
    assert len(seats(9, num_gpus=0)) == 3
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    assert [seat.cores for seat in seats(9, num_gpus=0)] == [(0,), (1,)]
    monkeypatch.setattr(module, "available_memory", lambda: 1e9)
    assert len(seats(9, num_gpus=0)) == 1


@pytest.mark.usefixtures("eight_cores")
def test_each_has_a_gpu_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [seat.environment for seat in seats(9, num_gpus=2)] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-1b")
    assert [seat.gpu for seat in seats(9, num_gpus=2)] == ["5", "GPU-1b"]


def test_a_seat_is_taken_and_left() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    with Seat((core,)).taken():
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before


def test_the_longest_begins_first() -> None:
    assert makespan([1, 2, 3, 4], 1) == 10 and makespan([1, 2, 3, 4], 2) == 5 and makespan([1, 2, 3, 4], 9) == 4
