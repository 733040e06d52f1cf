"""The token files that other rooms' tests are given are those of step 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from made_tokens import write_tokens

from zerokara import manifest
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.steps.command import Options
from zerokara.steps.tokenize import tokenize


def test_step_2_finds_nothing_left_to_do(
    make_config: Callable[..., PretrainConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(valid_fraction=0.1)
    paths = write_tokens(config)
    facts = manifest.read(paths.manifest).facts
    assert (facts["train"]["documents"], facts["valid"]["documents"]) == (270, 30)
    before = paths.manifest.read_bytes()
    tokenize(config, Options(tmp_path / "config.yaml"))
    assert "done already" in capsys.readouterr().out and paths.manifest.read_bytes() == before
