"""R1: the same training however it is shared out — processes, accumulation, ZeRO stages — in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

LOSS_TOLERANCE = 1e-5
"""Absolute, over 20 steps in fp32: only the order of additions differs."""


@pytest.fixture(scope="module")
def runs(train_runs: Callable) -> dict:
    alone = {
        "one": {"zero_stage": 0, "micro_batch_size": 8},
        "accumulated": {"zero_stage": 0, "micro_batch_size": 2},
        "accumulated_stage1": {"zero_stage": 1, "micro_batch_size": 2},
        "accumulated_stage3": {"zero_stage": 3, "micro_batch_size": 2},
        "other_batch": {"zero_stage": 0, "micro_batch_size": 4, "global_batch_size": 4, "train_tokens": 20 * 4 * 32},
    }
    together = {f"two_stage{stage}": {"zero_stage": stage, "micro_batch_size": 2} for stage in range(4)}
    return {**train_runs(alone), **train_runs(together, processes=2)}


@pytest.mark.parametrize(
    "name",
    ["accumulated", "accumulated_stage1", "accumulated_stage3", *[f"two_stage{stage}" for stage in range(4)]],
)
def test_equals_one_process_with_one_micro_batch(runs: dict, name: str) -> None:
    expected, got = runs["one"].losses, runs[name].losses
    assert len(expected) == 20
    assert expected[-1] < expected[0] - 0.5, "nothing was learned: equality would mean nothing"
    assert got == pytest.approx(expected, abs=LOSS_TOLERANCE)


@pytest.mark.parametrize("name", [f"two_stage{stage}" for stage in range(4)])
def test_final_weights_are_those_of_one_process(runs: dict, name: str) -> None:
    expected, got = runs["one"].weights, runs[name].weights
    assert expected.keys() == got.keys()
    for key, weight in expected.items():
        # Adam divides by the root of a tiny second moment: a difference in the last digit of a gradient grows.
        torch.testing.assert_close(got[key], weight, atol=2e-4, rtol=0)


def test_another_global_batch_is_another_training(runs: dict) -> None:
    """The control: a run that should differ does, by far more than the tolerance."""
    assert abs(runs["other_batch"].losses[-1] - runs["one"].losses[-1]) > 100 * LOSS_TOLERANCE
