"""`micro_batch_size: auto`: the size that is chosen, from measured peaks on a GPU, and that a run keeps it.

Training processes are stood in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from configs import config_of

from zerokara.errors import RunError
from zerokara.model.shapes import ModelShape
from zerokara.training import launching
from zerokara.training.launching import CPU_TOKENS, first_micro_batch, kept_micro_batch, try_steps
from zerokara.training.planning.memory import MemoryForecast
from zerokara.training.planning.processors import Devices
from zerokara.training.planning.run_folder import EarlierRun
from zerokara.training.planning.run_plan import RunPlan, make_plan
from zerokara.training.processes import supervision

GB = 10**9


@pytest.fixture
def plan(tiny_data: dict[str, str]) -> RunPlan:
    paths = {key: tiny_data[key] for key in ("input_tokenizer_file", "output_prefix", "input_jsonl")}
    settings = config_of(**paths, micro_batch_size="auto", global_batch_size=256, seq_len=32)
    return make_plan(settings, 1).with_settings(precision="fp32", micro_batch_size=64)


def on_gpu(plan: RunPlan, gpu_bytes: float) -> RunPlan:
    return replace(plan, devices=Devices(("NVIDIA H200",), int(gpu_bytes)))


def forecast_of(gpu: float | None = 80, seq_len: int = 2048, num_processes: int = 1, **settings: Any) -> MemoryForecast:
    shape = ModelShape("llama", 2, 64, 4, 4, 192, seq_len, 500, True, 1e4, 1e-5, 0.02)
    gpu_bytes = None if gpu is None else int(gpu * GB)
    config = config_of(**{"global_batch_size": 256, "micro_batch_size": 1, **settings})
    return MemoryForecast(config, shape, num_processes, 1, {}, 64 * GB, gpu_bytes)


def first_choice_of(forecast: MemoryForecast) -> int:
    return first_micro_batch(cast(RunPlan, SimpleNamespace(memory=forecast)))


def test_the_first_choice_is_the_largest_that_surely_fits_on_a_gpu() -> None:
    tight, roomy = forecast_of(gpu=2), forecast_of(gpu=8)
    chosen = first_choice_of(tight)
    assert tight.with_settings(micro_batch_size=chosen).fits
    assert not tight.with_settings(micro_batch_size=2 * chosen).fits
    assert first_choice_of(roomy) > chosen and 256 % chosen == 0
    assert first_choice_of(forecast_of(gpu=0.1)) == 1


def test_auto_on_a_cpu_stops_where_it_gets_no_faster_and_takes_all_where_that_is_little() -> None:
    for seq_len in (128, 2048, 8192):
        assert first_choice_of(forecast_of(None, seq_len)) * seq_len == max(CPU_TOKENS, seq_len)
    assert first_choice_of(forecast_of(None, 16, global_batch_size=24, num_processes=2)) == 12


def test_a_choice_is_kept_until_what_it_was_made_for_changes(plan: RunPlan, tmp_path: Path) -> None:
    plan = on_gpu(plan, 80 * GB).with_settings(micro_batch_size=16)
    plan.write(tmp_path / "plan.json")
    earlier = EarlierRun([], None, {}, json.loads((tmp_path / "plan.json").read_bytes()), ended_at=None)
    assert kept_micro_batch(plan, earlier) == kept_micro_batch(plan.with_settings(micro_batch_size=8), earlier) == 16
    assert kept_micro_batch(plan, None) is None
    for other in (on_gpu(plan, 40 * GB), plan.with_settings(zero_stage=2), replace(plan, num_processes=2)):
        assert kept_micro_batch(other, earlier) is None
    of_earlier_version = {key: value for key, value in earlier.plan.items() if key != "devices"}
    assert kept_micro_batch(plan, replace(earlier, plan=of_earlier_version)) == 16
    replace(plan, requested=plan.resolved).write(tmp_path / "plan.json")  # chosen by the user
    assert kept_micro_batch(plan, replace(earlier, plan=json.loads((tmp_path / "plan.json").read_bytes()))) is None


def stand_in(
    monkeypatch: pytest.MonkeyPatch, peak_of: Callable[[int], float], memory: float, code: int = 0
) -> list[int]:
    """Let a trial take as many GB as `peak_of` says of its micro batch; gives the sizes that were tried."""
    tried: list[int] = []

    def spawn(plan: RunPlan, work: str, path: str) -> int:
        assert work == "trial"
        tried.append(plan.resolved.micro_batch)
        if peak_of(tried[-1]) > memory:
            return supervision.OUT_OF_MEMORY
        result = {"peak_bytes": int(peak_of(tried[-1]) * GB), "seconds_per_step": 0.5}
        Path(path).write_text(json.dumps(result), encoding="ascii")
        return code

    monkeypatch.setattr(launching, "spawn", spawn)
    return tried


@pytest.mark.parametrize(
    ("first", "peak_of", "tried"),
    [
        (8, lambda size: 10 + size, [4, 8, 64]),  # by what a sequence takes, and confirmed
        (8, lambda size: 10 + 0.1 * size, [4, 8, 256]),
        (256, lambda size: 10 + 0.1 * size, [128, 256]),
        (64, lambda size: 2 * size, [32, 64]),  # 64 runs out of memory
        (64, lambda size: 1.5 * size, [32, 64]),  # 64 runs, with less to spare than is safe
        (16, lambda size: 10 + size + size**2 / 64, [8, 16, 32]),
        (2, lambda size: max(50, 2 * size), [1, 2, 256, 128, 64, 32]),  # the update sets the peak of few sequences
        (1, lambda size: 60 + 15 * size, [1, 2]),
    ],
)
def test_on_a_gpu_the_largest_that_fits_is_found_in_few_trials(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch, first: int, peak_of: Callable[[int], float], tried: list[int]
) -> None:
    found = stand_in(monkeypatch, peak_of, memory=100)
    monkeypatch.setattr(launching, "first_micro_batch", lambda _: first)
    chosen, result = try_steps(on_gpu(plan, 100 * GB))
    fitting = [size for size in found if peak_of(size) <= 86.5]
    assert found == tried and chosen.resolved.micro_batch == max(fitting)
    assert result.peak_bytes == int(peak_of(max(fitting)) * GB)


def test_the_smallest_is_taken_though_it_leaves_little_and_where_nothing_fits_it_fails(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, lambda size: 90 + size, memory=95)
    assert try_steps(on_gpu(plan, 100 * GB))[0].resolved.micro_batch == 1
    stand_in(monkeypatch, lambda size: 50 * size, memory=20)
    for each in (plan, on_gpu(plan, 20 * GB)):
        with pytest.raises(RunError, match="out of memory"):
            try_steps(each)


def test_a_size_that_the_user_chose_is_tried_alone(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    requested = plan.requested.model_copy(update={"micro_batch_size": 64})
    chosen = replace(on_gpu(plan, 80 * GB), requested=requested)
    tried = stand_in(monkeypatch, float, memory=20)
    with pytest.raises(RunError):
        try_steps(chosen)
    assert tried == [64]
    stand_in(monkeypatch, float, memory=80)
    tried_plan, result = try_steps(chosen)
    assert tried_plan == chosen and result.seconds_per_step == 0.5
    stand_in(monkeypatch, float, memory=80, code=1)  # another failure is passed on
    with pytest.raises(RunError, match="exit code 1"):
        try_steps(plan)
