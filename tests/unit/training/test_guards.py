"""Which steps are skipped, when a run is given up, and that a resumed run judges as an unbroken one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from zerokara.checkpoint import TrainingState
from zerokara.training.guards import FEWEST_STEPS, WINDOW_STEPS, StepGuard, TooManySkippedSteps

START = TrainingState(0, 0, 0, 0.0, {}, "t", "d", "fp32", {})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_skipped(number: float) -> None:
    guard = StepGuard(spike_sigmas=0, max_skipped_steps=3)
    assert str(number) in guard.skip_reason_of_loss(number)
    assert not guard.skip_reason_of_loss(1e9)  # spike_sigmas is 0


def test_a_loss_spike_is_measured_against_the_last_good_losses() -> None:
    guard = StepGuard(spike_sigmas=3, max_skipped_steps=3)
    for number in range(FEWEST_STEPS):
        assert not guard.skip_reason_of_loss(100.0)  # too few to judge by
        guard.note(2.0 if number % 2 else 4.0, "")  # mean 3, standard deviation 1
    assert not guard.skip_reason_of_loss(5.9) and not guard.skip_reason_of_loss(-50.0)
    reason = guard.skip_reason_of_loss(6.5)
    assert "spike" in reason and "3.5 standard deviations" in reason and "spike_sigmas is 3" in reason
    guard.note(6.5, reason)
    assert guard.skip_reason_of_loss(6.5) == reason  # a skipped loss is no measure
    for _ in range(WINDOW_STEPS):
        guard.note(8.0, "")
    assert guard.recent_losses == (8.0,) * WINDOW_STEPS
    assert not guard.skip_reason_of_loss(8.0) and "spike" in guard.skip_reason_of_loss(8.001)


def test_one_skipped_step_too_many_in_a_row_gives_up() -> None:
    guard = StepGuard(spike_sigmas=0, max_skipped_steps=2)
    for step in (1, 2):
        guard.note(math.nan, "the loss is nan")
        guard.check_skipped_in_row(step, "the loss is nan")
    guard.note(3.0, "")
    assert (guard.skipped_steps, guard.skipped_in_row) == (2, 0)
    for step in (4, 5):
        guard.note(math.nan, "the loss is nan")
        guard.check_skipped_in_row(step, "the loss is nan")
    guard.note(math.nan, "the loss is nan")
    with pytest.raises(TooManySkippedSteps, match=r"step 6: .* 3 .*max_skipped_steps is 2.*lr="):
        guard.check_skipped_in_row(6, "the loss is nan")


def test_a_resumed_guard_judges_as_the_one_before() -> None:
    first = StepGuard(spike_sigmas=2, max_skipped_steps=3)
    for number in range(130):
        first.note(3 + math.sin(number), "")
    first.note(math.nan, "x")
    state = replace(
        START,
        skipped_steps=first.skipped_steps,
        skipped_in_row=first.skipped_in_row,
        recent_losses=first.recent_losses,
    )
    resumed = StepGuard(2, 3, state)
    for loss in (3.0, 4.2, 4.5, 5.0, math.nan):
        assert resumed.skip_reason_of_loss(loss) == first.skip_reason_of_loss(loss)
    assert (resumed.skipped_steps, resumed.skipped_in_row, len(resumed.recent_losses)) == (1, 1, WINDOW_STEPS)
