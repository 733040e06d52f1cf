"""R6: a run that was cut short and went on equals one that was never cut; bit for bit in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def runs(train_runs: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("resume")
    trained = {}
    for precision, stage in (("fp32", 0), ("bf16", 1), ("fp32", 2), ("bf16", 3)):
        name = f"{precision}_stage{stage}"
        # 30 steps of 8 sequences over a corpus of some 300: the run crosses the edge of an epoch.
        common = {"precision": precision, "zero_stage": stage, "train_tokens": 60 * 8 * 32}
        trained[f"{name}_unbroken"] = common
        trained[f"{name}_broken"] = {**common, "stop_at": 7}
    first = train_runs(trained, folder=folder)
    again = {name: {**settings, "stop_at": 45} for name, settings in trained.items() if name.endswith("_broken")}
    train_runs(again, folder=folder)
    train_runs({name: {k: v for k, v in s.items() if k != "stop_at"} for name, s in again.items()}, folder=folder)
    return first


@pytest.mark.parametrize("name", ["fp32_stage0", "bf16_stage1", "fp32_stage2", "bf16_stage3"])
def test_resumed_twice_equals_unbroken_bit_for_bit(runs: dict, name: str) -> None:
    unbroken, broken = runs[f"{name}_unbroken"], runs[f"{name}_broken"]
    assert len(unbroken.losses) == 60
    assert broken.losses == unbroken.losses
    for key, weight in unbroken.weights.items():
        assert torch.equal(broken.weights[key], weight), key


def test_every_step_is_recorded_once(runs: dict) -> None:
    from zerokara.training import metrics

    steps = [line["step"] for line in metrics.read(Path(runs["bf16_stage1_broken"].folder)) if "loss" in line]
    assert steps == list(range(1, 61))


def test_another_number_of_processes_goes_on(train_runs: Callable, tmp_path: Path) -> None:
    settings = {"zero_stage": 2, "micro_batch_size": 4}
    train_runs({"run": {**settings, "stop_at": 10}}, folder=tmp_path)
    resumed = train_runs({"run": {**settings, "zero_stage": 3}}, processes=2, folder=tmp_path)["run"]
    unbroken = train_runs({"other": settings}, folder=tmp_path)["other"]
    assert resumed.losses == pytest.approx(unbroken.losses, abs=1e-5)
