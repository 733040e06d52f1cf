"""Weights & Biases, with the real library without a network: it records, and it can never stop a training."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerokara import config
from zerokara.training import metrics


@pytest.mark.slow
def test_offline_run_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = config.load(config.PretrainConfig, "/dev/null", ["tensorboard=false", "wandb=offline"])
    recorder = metrics.Recorder(tmp_path, settings, resumed_step=0)
    recorder.record({"step": 1, "tokens": 10, "loss": 2.0})
    recorder.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(metrics.read(tmp_path)) == 1


def test_whatever_it_raises_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("no API key")

    monkeypatch.setattr(wandb, "init", refuse)
    settings = config.load(config.PretrainConfig, "/dev/null", ["tensorboard=false", "wandb=online"])
    recorder = metrics.Recorder(tmp_path, settings, resumed_step=0)
    recorder.record({"step": 1, "tokens": 10, "loss": 2.0})
    recorder.close()
    assert "wandb: no API key; going on without it" in capsys.readouterr().out
    assert len(metrics.read(tmp_path)) == 1
