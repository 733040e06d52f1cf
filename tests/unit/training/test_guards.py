"""Which steps are skipped, when a run is given up, and that a resumed run judges as an unbroken one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from zerokara.checkpoint import TrainingState
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.training.guards import FEWEST_STEPS, WINDOW_STEPS, GivenUp, StepGuard

START = TrainingState(0, 0, 0, 0.0, {}, "t", "d", "fp32", {})


def guard(*overrides: str, state: TrainingState = START) -> StepGuard:
    return StepGuard(load(PretrainConfig, "/dev/null", list(overrides)), state)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_fault(loss: float) -> None:
    judge = guard()
    assert judge.skip_reason_of_loss(loss) == f"the loss is {loss}"
    assert judge.skip_reason_of_norm(loss) == "the gradient is not finite"
    assert judge.skip_reason_of_loss(1e9) == "" and judge.skip_reason_of_norm(1e9) == ""  # spike_sigmas is 0


def test_a_leap_is_measured_against_the_last_good_losses() -> None:
    judge = guard("spike_sigmas=3")
    for number in range(FEWEST_STEPS):
        assert judge.skip_reason_of_loss(100.0) == ""  # too few to say
        judge.note(2.0 if number % 2 else 4.0, "")  # mean 3, deviation 1
    assert judge.skip_reason_of_loss(5.9) == "" and judge.skip_reason_of_loss(-50.0) == ""
    fault = judge.skip_reason_of_loss(6.5)
    assert fault == "the loss 6.5000 is 3.5 deviations above the last 20 steps' mean of 3.0000 (spike_sigmas is 3)"
    judge.note(6.5, fault)
    assert judge.skip_reason_of_loss(6.5) == fault  # what was skipped is no measure
    for _ in range(WINDOW_STEPS):
        judge.note(8.0, "")
    assert judge.recent_losses == (8.0,) * WINDOW_STEPS
    assert judge.skip_reason_of_loss(8.0) == "" and "is far above" in judge.skip_reason_of_loss(8.001)


def test_one_too_many_in_a_row_gives_up() -> None:
    judge = guard("max_skipped_steps=2")
    for step in (1, 2):
        judge.note(math.nan, "the loss is nan")
        judge.require_patience(step, "the loss is nan")
    judge.note(3.0, "")
    assert (judge.skipped_steps, judge.skipped_in_row) == (2, 0)
    for step in (4, 5):
        judge.note(math.nan, "the loss is nan")
        judge.require_patience(step, "the loss is nan")
    judge.note(math.nan, "the loss is nan")
    with pytest.raises(GivenUp, match=r"step 6: the loss is nan; 3 skipped in a row, and max_skipped_steps is 2.*lr=…"):
        judge.require_patience(6, "the loss is nan")


def test_none_is_allowed_where_max_skipped_steps_is_0() -> None:
    judge = guard("max_skipped_steps=0")
    judge.note(math.nan, "x")
    with pytest.raises(GivenUp):
        judge.require_patience(1, "x")


def test_a_resumed_guard_judges_as_the_one_before() -> None:
    first = guard("spike_sigmas=2")
    for number in range(130):
        first.note(3 + math.sin(number), "")
    first.note(math.nan, "x")
    state = replace(
        START,
        skipped_steps=first.skipped_steps,
        skipped_in_row=first.skipped_in_row,
        recent_losses=first.recent_losses,
    )
    again = guard("spike_sigmas=2", state=state)
    for loss in (3.0, 4.2, 4.5, 5.0, math.nan):
        assert again.skip_reason_of_loss(loss) == first.skip_reason_of_loss(loss)
    assert (again.skipped_steps, again.skipped_in_row, len(again.recent_losses)) == (1, 1, WINDOW_STEPS)
