"""How trials choose a micro batch: by measured peaks on a GPU, by halving on a CPU; training processes are stood in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from configs import config_of

from zerokara.errors import RunError
from zerokara.training import trial_launch
from zerokara.training.planning.memory_forecast import MachineMemory
from zerokara.training.planning.run_plan import RunPlan, make_plan, with_micro_batch
from zerokara.training.processes import launcher

GB = 10**9


@pytest.fixture
def plan(tiny_data: dict[str, str]) -> RunPlan:
    paths = {key: tiny_data[key] for key in ("input_tokenizer_file", "output_prefix", "input_jsonl")}
    settings = config_of(**paths, micro_batch_size="auto", global_batch_size=64, seq_len=32)
    return with_micro_batch(make_plan(settings, 1, "fp32"), 64)


def stand_in(monkeypatch: pytest.MonkeyPatch, bytes_of_sequence: int, memory: int, code: int = 0) -> list[int]:
    """Let a trial take so much memory for each sequence of its micro batch; gives the sizes that were tried."""
    tried: list[int] = []

    def spawn(plan: RunPlan, work: str, path: str) -> int:
        assert work == "trial"
        tried.append(plan.config.micro_batch)
        peak = GB + plan.config.micro_batch * bytes_of_sequence
        if peak > memory:
            return launcher.OUT_OF_MEMORY
        result = {"peak_bytes": peak, "seconds_per_step": 0.5}
        Path(path).write_text(json.dumps(result), encoding="ascii")
        return code

    monkeypatch.setattr(trial_launch, "spawn", spawn)
    return tried


def test_on_a_gpu_the_largest_that_fits_is_found_in_few_trials(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = stand_in(monkeypatch, GB, memory=40 * GB)
    forecast = plan.memory_forecast(MachineMemory(40 * GB, 100 * GB))
    assert trial_launch.try_steps(plan, forecast).plan.config.micro_batch == 32
    assert tried == [1, 2, 32]


def test_on_a_cpu_it_is_halved_until_it_fits(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = stand_in(monkeypatch, GB, memory=20 * GB)
    forecast = plan.memory_forecast(MachineMemory(None, 100 * GB))
    assert trial_launch.try_steps(plan, forecast).plan.config.micro_batch == 16
    assert tried == [64, 32, 16]


@pytest.mark.parametrize("gpu_bytes", [None, 20 * GB])
def test_where_nothing_fits_it_fails(plan: RunPlan, monkeypatch: pytest.MonkeyPatch, gpu_bytes: int | None) -> None:
    stand_in(monkeypatch, 50 * GB, memory=20 * GB)
    with pytest.raises(RunError, match=str(launcher.OUT_OF_MEMORY)):
        trial_launch.try_steps(plan, plan.memory_forecast(MachineMemory(gpu_bytes, 100 * GB)))


def test_a_size_that_the_user_chose_is_tried_alone(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = replace(plan, given=plan.given.model_copy(update={"micro_batch_size": 64}))
    tried = stand_in(monkeypatch, GB, memory=20 * GB)
    with pytest.raises(RunError):
        trial_launch.try_steps(chosen, plan.memory_forecast(MachineMemory(None, 100 * GB)))
    assert tried == [64]
    tried = stand_in(monkeypatch, GB, memory=80 * GB)
    assert trial_launch.try_steps(chosen, plan.memory_forecast(MachineMemory(None, 100 * GB))).plan is chosen


def test_another_failure_is_passed_on(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = stand_in(monkeypatch, GB, memory=80 * GB, code=1)
    with pytest.raises(RunError, match="exit code 1"):
        trial_launch.try_steps(plan, plan.memory_forecast(MachineMemory(None, 100 * GB)))
    assert tried == [64]
