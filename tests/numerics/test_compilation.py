"""Compiled layers: the same losses within rounding, and a resumed run equals an unbroken one bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import rounding
import torch


@pytest.fixture(scope="module")
def runs(train_runs: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("compiled")
    compiled = {"compile": "on", "zero_stage": 1}
    first = {"eager": {"zero_stage": 1}, "unbroken": compiled, "broken": {**compiled, "stop_at": 9}}
    return {**train_runs(first, folder=folder), **train_runs({"broken": compiled}, folder=folder)}


def test_losses_equal_those_of_eager_layers(runs: dict) -> None:
    eager, compiled = runs["eager"].losses, runs["unbroken"].losses
    assert len(eager) == 20 and eager[0] - eager[-1] > 0.5
    rounding.assert_same_curve(compiled, eager)
    assert compiled != eager  # or nothing was compiled


def test_resumed_equals_unbroken_bit_for_bit(runs: dict) -> None:
    broken, unbroken = runs["broken"], runs["unbroken"]
    assert broken.losses == unbroken.losses
    for name, weight in unbroken.weights.items():
        assert torch.equal(broken.weights[name], weight), name
