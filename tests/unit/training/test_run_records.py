"""What DeepSpeed is told: ours, and the template's."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import UserError
from zerokara.training.compute.deepspeed_settings import load_template, settings_for


def settings(*overrides: str) -> PretrainConfig:
    return load(PretrainConfig, "/dev/null", ["tensorboard=false", *overrides])


def test_settings_are_ours_and_the_rest_is_the_templates() -> None:
    made = settings_for(
        settings("zero_stage=2", "precision=fp32"), 2, {"zero_optimization": {"overlap_comm": True}, "x": 1}
    )
    assert made["zero_optimization"] == {"overlap_comm": True, "stage": 2}
    assert (made["train_batch_size"], made["gradient_accumulation_steps"], made["x"]) == (32, 2, 1)
    assert made["bf16"] == {"enabled": False} and "data_types" not in made


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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold one JSON object"),
        ('{"a": ' * 100_000, "is larger than 256 kB"),
        ('{"a": ' * 900 + "1" + "}" * 900, "has objects in more than 8 levels"),
        ('{"a": ' * 20_000 + "1" + "}" * 20_000, "is not JSON: depth limit"),
    ],
)
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
