"""The time that is left, and the limits of time."""

from __future__ import annotations

import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import UserError
from zerokara.training.monitoring import pace
from zerokara.training.monitoring.pace import Pace
from zerokara.training.planning import limits
from zerokara.training.planning.limits import TimeLimits


def settings(*overrides: str) -> PretrainConfig:
    return load(PretrainConfig, "/dev/null", list(overrides))


def paused(of: Pace, kind: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((100.0, 100.0 + seconds))
    monkeypatch.setattr(pace.time, "monotonic", lambda: next(times))
    with of.pause(kind):
        pass


def test_time_left_counts_steps_validations_and_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Pace(100, {"validation": 10, "save": 30})
    assert made.seconds_left(0) == 0  # nothing is known
    made.step(50.0)
    assert made.seconds_left(1) == 99 * 50
    for _ in range(20):
        made.step(2.0)  # the first step of a start says nothing of the others
    assert made.seconds_left(21) == pytest.approx(79 * 2)
    paused(made, "validation", 7, monkeypatch)
    paused(made, "save", 11, monkeypatch)
    # Behind step 21: validations at 30, 40, … 100; saves at 30, 60, 90 and at the end.
    assert made.seconds_left(21) == pytest.approx(79 * 2 + 8 * 7 + 4 * 11)
    # A line is told before the pauses of its own step.
    assert made.seconds_left(30) == pytest.approx(70 * 2 + 8 * 7 + 4 * 11)
    assert made.seconds_left(31) == pytest.approx(69 * 2 + 7 * 7 + 3 * 11)
    assert made.seconds_left(100) == pytest.approx(7 + 11)


def test_time_left_follows_a_change_of_pace() -> None:
    made = Pace(10_000, {})
    for _ in range(200):
        made.step(1.0)
    for _ in range(100):
        made.step(3.0)
    assert 2.6 < made.seconds_a_step < 3.0


def test_hours_are_counted_over_all_starts_and_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.STARTED_NAME, "1000")
    now, trained = [1000.0], [0.0]

    def limit(*overrides: str) -> TimeLimits:
        return TimeLimits(settings(*overrides), int(2e9), lambda: trained[0], lambda: now[0])

    now[0], trained[0] = 1e9, 1e9
    assert limit().look() == ""
    now[0], trained[0] = 1000 + 3600 - 51, 7199
    assert limit("max_hours=2", "max_hours_per_start=1").look() == ""
    trained[0] = 7200
    assert limit("max_hours=2").look() == "max_hours = 2 (raise it to go on)"
    now[0] += 2  # 2 GB take 20 s at 100 MB/s, and leaving takes 30
    assert limit("max_hours_per_start=1").look() == "max_hours_per_start = 1, 49.0 s before it"


def test_limits_that_leave_nothing_to_do_are_told_in_numbers() -> None:
    limits.check(settings("max_hours=2", "max_hours_per_start=0.1"), int(1e9), trained_seconds=7199, take="")
    with pytest.raises(UserError) as caught:
        limits.check(settings("max_hours=2"), 0, trained_seconds=7205, take="bash 4_convert_to_HF.sh --config it.yaml")
    assert str(caught.value) == (
        "--set: max_hours = 2.0: the run has been trained for 2 hours already, as long as it may; "
        "raise it to go on; or take what is there: bash 4_convert_to_HF.sh --config it.yaml"
    )
    with pytest.raises(UserError, match=r"leaves no time to train: 36\.0 s, of which the last 40\.0 s are kept"):
        limits.check(settings("max_hours_per_start=0.01"), int(1e9), 0, take="")
