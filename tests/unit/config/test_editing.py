from __future__ import annotations

from pathlib import Path

import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.writing import write_values
from zerokara.errors import RunError, UserError

TEXT = """# A run of mine.
train_tokens: auto   # as long as it takes
lr : "auto"
model_size:
stages: [{tokens: 8e6}]  # lr: 3 is no setting here
#lr: 0.5
seed: 7"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(TEXT.replace("model_size:\n", "model_size: ''\n"), encoding="utf-8")
    return path


def test_values_change_and_nothing_else(config: Path) -> None:
    before = config.read_text(encoding="utf-8")
    write_values(
        config, {"train_tokens": 1234, "lr": 0.0125, "model_size": "5M", "num_layers": "auto", "adam_epsilon": 1e-09}
    )
    after = config.read_text(encoding="utf-8")
    expected = before.replace("train_tokens: auto ", "train_tokens: 1234 ").replace('lr : "auto"', "lr : 0.0125")
    assert after == expected.replace("model_size: ''", "model_size: 5M") + "\nnum_layers: auto\nadam_epsilon: 1e-09\n"
    loaded = load(PretrainConfig, config)
    assert (loaded.train_tokens, loaded.lr, loaded.model_size, loaded.seed) == (1234, 0.0125, "5M", 7)
    write_values(config, {"model_size": "", "num_layers": 6})
    assert load(PretrainConfig, config).model_size == ""
    assert [path.name for path in config.parent.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("block", ["lr:\n  0.1\n", "{lr: 0.1}\n", "'lr': 0.1\n"])
def test_what_would_touch_something_else_is_left_as_it_was(config: Path, block: str) -> None:
    config.write_text(block, encoding="utf-8")
    with pytest.raises(RunError, match=r"write by hand: lr: 0\.5"):
        write_values(config, {"lr": 0.5})
    assert config.read_text(encoding="utf-8") == block


def test_a_value_that_breaks_a_rule_is_not_written(config: Path) -> None:
    before = config.read_bytes()
    with pytest.raises(UserError, match="min_lr"):
        write_values(config, {"lr": 1e-9, "min_lr": 0.1})
    assert config.read_bytes() == before
