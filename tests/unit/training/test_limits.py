"""The limits of time: over all starts of a run, and for one start."""

from __future__ import annotations

from typing import Any

import pytest
from configs import config_of

from zerokara.errors import Fault, UserError
from zerokara.training.planning import limits
from zerokara.training.planning.limits import TimeLimits


def test_hours_are_counted_over_all_starts_and_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.STARTED_NAME, "1000")
    now, trained = [1000.0], [0.0]

    def limit(**settings: Any) -> TimeLimits:
        return TimeLimits(config_of(**settings), int(2e9), lambda: trained[0], lambda: now[0])

    now[0], trained[0] = 1e9, 1e9
    assert limit().look() == ""
    now[0], trained[0] = 1000 + 3600 - 51, 7199
    assert limit(max_hours=2, max_hours_per_start=1).look() == ""
    trained[0] = 7200
    assert limit(max_hours=2).look().startswith("max_hours = 2")
    now[0] += 2  # 2 GB take 20 s at 100 MB/s, and leaving takes 30
    reason = limit(max_hours_per_start=1).look()
    assert reason.startswith("max_hours_per_start = 1") and "49.0 s" in reason


def fault_of(trained_seconds: float, checkpoint_bytes: int, **settings: Any) -> Fault:
    with pytest.raises(UserError) as caught:
        limits.check_hours(
            config_of(**settings), checkpoint_bytes, trained_seconds, take="bash convert.sh --config it.yaml"
        )
    (fault,) = caught.value.faults
    return fault


def test_a_run_that_has_had_its_hours_is_refused() -> None:
    limits.check_hours(config_of(max_hours=2, max_hours_per_start=0.1), int(1e9), trained_seconds=7199, take="")
    fault = fault_of(7205, 0, max_hours=2)
    assert (fault.key, fault.value) == ("max_hours", 2.0)
    assert "bash convert.sh --config it.yaml" in fault.remedy


def test_a_start_without_time_to_train_and_save_is_refused() -> None:
    fault = fault_of(0, int(1e9), max_hours_per_start=0.01)
    assert (fault.key, fault.value) == ("max_hours_per_start", 0.01)
    assert "36.0 s" in fault.rule and "40.0 s" in fault.rule
