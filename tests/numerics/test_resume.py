"""R6: a run that was cut short and went on equals one that was never cut; bit for bit in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zerokara import config
from zerokara.steps import tokenize
from zerokara.training import metrics
from zerokara.training.consumption import consumption_of

STAGES = (
    "[{tokens: 3200, source_weights: [3, 1]}, {tokens: 8064, source_weights: [1, 5]}, "
    "{tokens: rest, source_weights: [1, 0]}]"
)
"""100 and 252 sequences of 32: the first ends within step 13, the second with step 44."""


@pytest.fixture(scope="module")
def two_sources(tiny_data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that name the tiny corpus as two sources, of which the first is read more than once."""
    folder = tmp_path_factory.mktemp("sources")
    lines = Path(tiny_data["input_jsonl"]).read_text(encoding="utf-8").splitlines(keepends=True)
    for name, part in (("a", lines[:30]), ("b", lines[30:])):
        (folder / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    settings = {"input_jsonl": f"[{folder}/a.jsonl, {folder}/b.jsonl]", "output_prefix": str(folder / "tokens")}
    options = [option for key, value in settings.items() for option in ("--set", f"{key}={value}")]
    assert tokenize.main(["--config", tiny_data["config"], *options]) == 0
    return settings


@pytest.fixture(scope="module")
def runs(train_runs: Callable, two_sources: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("resume")
    trained = {}
    for precision, stage in (("fp32", 0), ("bf16", 1), ("fp32", 2), ("bf16", 3)):
        name = f"{precision}_stage{stage}"
        # 30 steps of 8 sequences over a corpus of some 300: the run crosses the edge of an epoch.
        common = {"precision": precision, "zero_stage": stage, "train_tokens": 60 * 8 * 32}
        trained[f"{name}_unbroken"] = common
        trained[f"{name}_broken"] = {**common, "stop_at": 7}
    common = {"zero_stage": 0, "train_tokens": 60 * 8 * 32, "stages": STAGES, **two_sources}
    trained["curriculum_unbroken"] = common
    trained["curriculum_broken"] = {**common, "stop_at": 7}
    first = train_runs(trained, folder=folder)
    again = {name: {**settings, "stop_at": 45} for name, settings in trained.items() if name.endswith("_broken")}
    train_runs(again, folder=folder)
    train_runs({name: {k: v for k, v in s.items() if k != "stop_at"} for name, s in again.items()}, folder=folder)
    return first


@pytest.mark.parametrize("name", ["fp32_stage0", "bf16_stage1", "fp32_stage2", "bf16_stage3", "curriculum"])
def test_resumed_twice_equals_unbroken_bit_for_bit(runs: dict, name: str) -> None:
    unbroken, broken = runs[f"{name}_unbroken"], runs[f"{name}_broken"]
    assert len(unbroken.losses) == 60
    assert broken.losses == unbroken.losses
    for key, weight in unbroken.weights.items():
        assert torch.equal(broken.weights[key], weight), key


def test_every_step_is_recorded_once(runs: dict) -> None:
    steps = [line["step"] for line in metrics.read(Path(runs["bf16_stage1_broken"].folder)) if "loss" in line]
    assert steps == list(range(1, 61))


def test_what_a_curriculum_read_is_what_its_table_says(runs: dict) -> None:
    folder = runs["curriculum_broken"].folder
    table = consumption_of(config.load(config.PretrainConfig, folder / "config_resolved.yaml"))
    read = [line["source_tokens"] for line in metrics.read(folder) if "loss" in line]
    assert read[-1] == [use.tokens_taken for use in table.sources]
    assert sum(read[0]) == 8 * 32 and read == sorted(read)
    in_first_stage, in_second = (
        [sum(stage.sources[source].tokens_taken for stage in table.stages[:number]) for source in (0, 1)]
        for number in (1, 2)
    )
    assert in_first_stage == [75 * 32, 25 * 32] and read[43] == in_second
    assert table.sources[0].epochs > 1  # so the run crosses the edge of an epoch of that source


def test_another_number_of_processes_goes_on(train_runs: Callable, tmp_path: Path) -> None:
    settings = {"zero_stage": 2, "micro_batch_size": 4}
    train_runs({"run": {**settings, "stop_at": 10}}, folder=tmp_path)
    resumed = train_runs({"run": {**settings, "zero_stage": 3}}, processes=2, folder=tmp_path)["run"]
    unbroken = train_runs({"other": settings}, folder=tmp_path)["other"]
    assert resumed.losses == pytest.approx(unbroken.losses, abs=1e-5)
