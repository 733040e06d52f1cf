"""DeepSpeed settings, metrics, and plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerokara import config
from zerokara.errors import UserError
from zerokara.training import metrics, plots
from zerokara.training.deepspeed_settings import load_template, settings_for


def settings(*overrides: str) -> config.PretrainConfig:
    return config.load(config.PretrainConfig, "/dev/null", ["tensorboard=false", *overrides])


def test_settings_are_ours_and_the_rest_is_the_templates() -> None:
    made = settings_for(
        settings("zero_stage=2", "precision=fp32"), 2, {"zero_optimization": {"overlap_comm": True}, "x": 1}
    )
    assert made["zero_optimization"] == {"overlap_comm": True, "stage": 2}
    assert (made["train_batch_size"], made["gradient_accumulation_steps"], made["x"]) == (32, 2, 1)
    assert made["bf16"] == {"enabled": False} and "data_types" not in made


def test_stage_0_in_bf16_is_served_by_stage_1() -> None:
    assert settings_for(settings("zero_stage=0", "precision=bf16"), 1, {})["zero_optimization"]["stage"] == 1
    assert settings_for(settings("zero_stage=0", "precision=fp32"), 1, {})["zero_optimization"]["stage"] == 0


def test_a_template_that_sets_what_the_config_owns_is_refused_with_every_key(tmp_path: Path) -> None:
    path = tmp_path / "template.json"
    path.write_text(
        '{\n  "fp16": {"enabled": true},\n  "zero_optimization": {\n    "stage": 3\n  }\n}\n', encoding="utf-8"
    )
    with pytest.raises(UserError) as caught:
        load_template(path)
    text = str(caught.value)
    assert "template.json:2: fp16 = {'enabled': True}: belongs to config.yaml (precision); remove it here" in text
    assert "template.json:4: zero_optimization.stage = 3: belongs to config.yaml (zero_stage)" in text


@pytest.mark.parametrize(("content", "words"), [("{", "is not JSON"), ("[]", "must hold one JSON object")])
def test_a_template_that_is_no_json_is_told(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "template.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        load_template(path)
    with pytest.raises(UserError, match="there is no such file"):
        load_template(tmp_path / "none.json")


def test_the_shipped_template_is_accepted() -> None:
    root = Path(__file__).resolve().parents[3]
    assert "zero_optimization" in load_template(root / "original_codes" / "ds_config_gpt_TEMPLATE.json")


def test_metrics_forget_what_will_be_trained_again(tmp_path: Path) -> None:
    first = metrics.Recorder(tmp_path, settings(), resumed_step=0)
    for step in (1, 2, 3):
        first.record({"step": step, "tokens": step, "loss": 3.0 - step})
    first.close()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4, "lo')  # a process that was killed in the middle of a line
    again = metrics.Recorder(tmp_path, settings(), resumed_step=2)
    again.record({"step": 3, "tokens": 3, "loss": 0.5})
    again.close()
    assert [(line["step"], line["loss"]) for line in metrics.read(tmp_path)] == [(1, 2.0), (2, 1.0), (3, 0.5)]
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines())


def test_the_loss_is_drawn(tmp_path: Path) -> None:
    recorder = metrics.Recorder(tmp_path, settings(), resumed_step=0)
    for step in range(1, 20):
        recorder.record({"step": step, "tokens": step * 10, "loss": 5 / step, "learning_rate": 0.1})
    recorder.record({"step": 19, "tokens": 190, "valid_loss": 0.4, "valid_bits_per_byte": 0.2})
    recorder.close()
    picture = plots.draw_loss(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
