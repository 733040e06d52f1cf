"""Text for the proofs comes from every source and from places spread over each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerokara.config.convert_config import ConvertConfig
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import UserError
from zerokara.huggingface import check_corpus


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def test_sources_take_turns_until_there_are_lines_enough(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [f"a{i}" for i in range(50)])
    config = PretrainConfig(input_jsonl=(first, write(tmp_path / "b.jsonl", ["b0\n\nb1", "b2"])))
    files = check_corpus.files_for(ConvertConfig(), config)
    assert check_corpus.documents(files, config, 5) == ["a0", "b0\n\nb1", "a1", "b2"]
    assert len(check_corpus.documents(files, config, 1000)) == 52


def test_a_large_file_is_read_from_many_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_corpus, "RANGE_BYTES", 200)
    config = PretrainConfig(input_jsonl=(write(tmp_path / "a.jsonl", [f"{i:04}" for i in range(1000)]),))
    files = check_corpus.files_for(ConvertConfig(), config)
    first = [int(text) for text in check_corpus.documents(files, config, 16)]
    assert len(first) == 16 and max(first) - min(first) > 800
    everything = check_corpus.documents(files, config, 10_000)
    assert sorted(map(int, everything)) == list(range(1000))


def test_another_corpus_may_be_named(tmp_path: Path) -> None:
    named = ConvertConfig(check_corpus=(write(tmp_path / "c.jsonl", ["c"]),))
    config = PretrainConfig(input_jsonl=(str(tmp_path / "gone.jsonl"),))
    assert check_corpus.documents(check_corpus.files_for(named, config), config, 10) == ["c"]
    with pytest.raises(UserError) as caught:
        check_corpus.files_for(ConvertConfig(), config)
    assert [fault.key for fault in caught.value.faults] == ["check_corpus"]
