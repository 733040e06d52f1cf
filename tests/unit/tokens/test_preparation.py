"""What step 2 finds out about a tokenizer before the work: that it can be exported, and what is special about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import foreign_models
import pytest
from foreign_models import LLAMA

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.find import find_files
from zerokara.errors import UserError
from zerokara.tokenizer.compatibility import notes
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.estimate import PreparedEncoding, prepare


def _prepare(make_config: Callable[..., PretrainConfig], path: Path) -> PreparedEncoding:
    config = make_config(input_tokenizer_file=str(path))
    return prepare(config, find_files(config.input_jsonl, ""))


def test_a_tokenizer_of_step_1(make_config: Callable[..., PretrainConfig], model_path: Path, corpus: Path) -> None:
    prepared, encoder = _prepare(make_config, model_path), Encoder(model_path)
    assert prepared.encoder.sha256 == encoder.sha256 and not notes(encoder)
    assert prepared.choice.name.startswith("sentencepiece")
    assert prepared.expected.corpus_bytes == corpus.stat().st_size
    assert prepared.expected.documents == pytest.approx(300, rel=0.1) and prepared.expected.tokens > 10_000


def test_notes_on_a_tokenizer_that_step_1_did_not_make(
    make_config: Callable[..., PretrainConfig], tmp_path: Path
) -> None:
    prepared = _prepare(make_config, foreign_models.train(tmp_path / "llama.model", LLAMA))
    assert prepared.encoder.eos_id == 2 and any("<0x0A>" in note for note in notes(prepared.encoder))


def test_a_tokenizer_that_cannot_be_exported(make_config: Callable[..., PretrainConfig], tmp_path: Path) -> None:
    path = foreign_models.train(tmp_path / "llama.model", {**LLAMA, "user_defined_symbols": ["<a>"]})
    with pytest.raises(UserError) as caught:
        _prepare(make_config, path)
    (fault,) = caught.value.faults
    assert fault.where == str(path) and "'<a>'" in fault.rule


def test_a_file_that_is_no_tokenizer(make_config: Callable[..., PretrainConfig], tmp_path: Path) -> None:
    (tmp_path / "x.model").write_bytes(b"no model")
    with pytest.raises(UserError) as caught:
        _prepare(make_config, tmp_path / "x.model")
    (fault,) = caught.value.faults
    assert fault.where == str(tmp_path / "x.model") and "step 1" in fault.remedy
