"""A missing tokenizer is reported where the configuration names it, with the one that step 1 made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerokara import manifest
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import Fault, UserError
from zerokara.steps.inputs import check_tokenizer_file


def _made(folder: Path, age: int = 0, step: str = "train_tokenizer") -> Path:
    folder.mkdir(parents=True)
    model = folder / "tokenizer.model"
    model.write_bytes(b"a model")
    os.utime(model, (1e9 - age, 1e9 - age))
    manifest.write(folder / "manifest.json", manifest.StepSpec(step, {}), {"tokenizer": model}, {}, 0.0)
    return model


def _fault(config_path: Path) -> Fault:
    with pytest.raises(UserError) as raised:
        check_tokenizer_file(load(PretrainConfig, config_path))
    (fault,) = raised.value.faults
    return fault


@pytest.fixture
def config_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.yaml").write_text("lr: 1e-3\ninput_tokenizer_file: tokenizers/embedded/tokenizer.model\n")
    monkeypatch.chdir(tmp_path)
    return Path("config.yaml")


def test_without_any_tokenizer(config_path: Path) -> None:
    fault = _fault(config_path)
    assert (fault.where, fault.key) == ("config.yaml:2", "input_tokenizer_file")
    assert fault.value == "tokenizers/embedded/tokenizer.model" and "step 1" in fault.remedy


def test_the_newest_tokenizer_of_step_1_is_named(config_path: Path) -> None:
    _made(Path("tokenizers/older"), age=100)
    made = _made(Path("tokenizers/newer"), age=50)
    _made(Path("tokenizers/other"), step="other")
    assert str(made) in _fault(config_path).remedy


def test_the_output_of_step_1_s_own_configuration_is_found(config_path: Path) -> None:
    made = _made(Path("elsewhere/mine"))
    Path("sentence_piece_config.yaml").write_text("output_dir: elsewhere/mine\n", encoding="utf-8")
    assert str(made) in _fault(config_path).remedy


def test_an_empty_file(config_path: Path) -> None:
    model = _made(Path("tokenizers/embedded"))
    check_tokenizer_file(load(PretrainConfig, config_path))
    model.write_bytes(b"")
    assert "empty" in _fault(config_path).rule
