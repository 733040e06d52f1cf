"""Real text for the proofs comes from every source and from places spread over each; a notebook's is what the run was
validated on, or none."""

from pathlib import Path

import numpy as np
import pytest
from configs import fault_of
from corpus_files import write_texts
from made_tokens import write_documents

from zerokara import manifest
from zerokara.config.convert_config import ConvertConfig
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.writing import as_yaml
from zerokara.huggingface import checkpoint_source
from zerokara.huggingface.exported_folder import validation_text
from zerokara.manifest import sha256_of
from zerokara.tokens.indexed import TokenPaths, bin_path


def documents(config: PretrainConfig, num_lines: int, settings: ConvertConfig | None = None) -> list[str]:
    files = checkpoint_source.corpus_files(settings or ConvertConfig(), config)
    return checkpoint_source.documents(files, config, num_lines)


def test_sources_take_turns_until_there_are_lines_enough(tmp_path: Path) -> None:
    first = write_texts(tmp_path / "a.jsonl", (f"a{i}" for i in range(50)))
    other = write_texts(tmp_path / "b.jsonl", ["b0\n\nb1", "b2"])
    config = PretrainConfig(input_jsonl=(first, other))
    assert documents(config, 5) == ["a0", "b0\n\nb1", "a1", "b2"]
    assert len(documents(config, 1000)) == 52


def test_a_large_file_is_read_from_many_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_source, "RANGE_BYTES", 200)
    config = PretrainConfig(input_jsonl=(write_texts(tmp_path / "a.jsonl", (f"{i:04}" for i in range(1000))),))
    first = [int(text) for text in documents(config, 16)]
    assert len(first) == 16 and max(first) - min(first) > 800
    assert sorted(map(int, documents(config, 10_000))) == list(range(1000))


def test_another_corpus_may_be_named(tmp_path: Path) -> None:
    named = ConvertConfig(check_corpus=(write_texts(tmp_path / "c.jsonl", ["c"]),))
    config = PretrainConfig(input_jsonl=(str(tmp_path / "gone.jsonl"),))
    assert documents(config, 10, named) == ["c"]
    assert fault_of(documents, config, 10).key == "check_corpus"


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


def test_a_notebooks_text_is_the_first_validation_documents_or_none(folders: tuple[Path, Path]) -> None:
    model, run = folders
    assert validation_text(model, run, decode, max_tokens=7) == "100 101 102 103 104\n110 111"
    whole = validation_text(model, run / "global_step10", decode)
    assert whole == "\n".join(decode(list(range(start, start + 5))) for start in (100, 110, 120))
    assert validation_text(model, model, decode) is None
    manifest.write(model / "manifest.json", manifest.StepSpec("convert", {}), {}, {"data": {"sha256": "0"}}, 0.0)
    assert validation_text(model, run, decode) is None, "other token files"
    (model / "manifest.json").unlink()
    assert validation_text(model, run, decode) is None
