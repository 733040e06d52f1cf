"""The text that a notebook measures a model on is what the run was validated on, or none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zerokara import manifest
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.writing import as_yaml
from zerokara.hashing import sha256_of
from zerokara.huggingface.validation_text import validation_text
from zerokara.tokens.indexed import write_documents
from zerokara.tokens.layout import TokenPaths, bin_path


def decode(ids: list[int]) -> str:
    return " ".join(map(str, ids))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """An exported folder and the run folder it was made from, as far as they matter here."""
    config = PretrainConfig(output_prefix=str(tmp_path / "tokens"))
    paths = TokenPaths(config.output_prefix)
    for prefix, start in ((paths.train, 0), (paths.valid, 100)):
        documents = [np.arange(start + 10 * n, start + 10 * n + 5) for n in range(3)]
        write_documents(prefix, documents, np.dtype(np.uint16))
    trained_on = bin_path(paths.train)
    manifest.write(paths.manifest, manifest.StepSpec("tokenize", {}), {"train": trained_on}, {}, 0.0)
    run, model = tmp_path / "run", tmp_path / "hf"
    run.mkdir(), model.mkdir()
    (run / "config_resolved.yaml").write_text(as_yaml(config), encoding="utf-8")
    facts = {"data": {"sha256": sha256_of(trained_on)}}
    manifest.write(model / "manifest.json", manifest.StepSpec("convert", {}), {}, facts, 0.0)
    return model, run


def test_it_is_the_first_validation_documents(folders: tuple[Path, Path]) -> None:
    model, run = folders
    assert validation_text(model, run, decode, max_tokens=7) == "100 101 102 103 104\n110 111"
    assert validation_text(model, run / "global_step10", decode) == "\n".join(
        decode(list(range(start, start + 5))) for start in (100, 110, 120)
    )


def test_other_token_files_or_none_give_no_text(folders: tuple[Path, Path]) -> None:
    model, run = folders
    assert validation_text(model, model, decode) is None
    manifest.write(model / "manifest.json", manifest.StepSpec("convert", {}), {}, {"data": {"sha256": "0"}}, 0.0)
    assert validation_text(model, run, decode) is None
    (model / "manifest.json").unlink()
    assert validation_text(model, run, decode) is None
