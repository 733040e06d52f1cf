"""The time that a run will still take."""

from __future__ import annotations

import pytest

from zerokara.training.monitoring import pace
from zerokara.training.monitoring.pace import Pace


def pause(of: Pace, kind: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((100.0, 100.0 + seconds))
    monkeypatch.setattr(pace.time, "monotonic", lambda: next(times))
    with of.pause(kind):
        pass


def test_time_left_counts_steps_validations_and_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Pace(100, {"validation": 10, "save": 30})
    assert measured.seconds_left(0) == 0  # nothing is known yet
    measured.step(50.0)
    assert measured.seconds_left(1) == 99 * 50
    for _ in range(20):
        measured.step(2.0)  # the first step of a start no longer counts
    assert measured.seconds_left(21) == pytest.approx(79 * 2)
    pause(measured, "validation", 7, monkeypatch)
    pause(measured, "save", 11, monkeypatch)
    # After step 21: validations at 30, 40, … 100; saves at 30, 60, 90 and at the end.
    assert measured.seconds_left(21) == pytest.approx(79 * 2 + 8 * 7 + 4 * 11)
    # A step is logged before its own pauses.
    assert measured.seconds_left(30) == pytest.approx(70 * 2 + 8 * 7 + 4 * 11)
    assert measured.seconds_left(31) == pytest.approx(69 * 2 + 7 * 7 + 3 * 11)
    assert measured.seconds_left(100) == pytest.approx(7 + 11)


def test_time_left_follows_a_change_of_speed() -> None:
    measured = Pace(10_000, {})
    for _ in range(200):
        measured.step(1.0)
    for _ in range(100):
        measured.step(3.0)
    assert 2.6 < measured.seconds_per_step < 3.0
