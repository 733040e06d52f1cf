"""Real text for the proofs comes from every source and from places spread over each; a notebook's is what the run was
validated on, or none."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import fault_of
from corpus_files import write_texts
from made_checkpoints import saved, state_of
from made_tokens import write_documents

from zerokara import checkpoint
from zerokara.base import manifest
from zerokara.base.manifest import sha256_of
from zerokara.checkpoint import store
from zerokara.checkpoint.folders import prune, set_aside
from zerokara.config.convert_config import ConvertConfig
from zerokara.config.engine import MonitoringSettings
from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.writing import as_yaml
from zerokara.model.shapes import ModelShape
from zerokara.publishing import checkpoint_source
from zerokara.publishing.exported_folder import prompts, validation_text
from zerokara.tokens.indexed import TokenPaths, bin_path


def documents(config: PretrainConfig, num_lines: int, settings: ConvertConfig | None = None) -> list[str]:
    files = checkpoint_source.corpus_files(settings or ConvertConfig(), config, "")
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
    moved: Any = FinetuneRunConfig(output_prefix=str(tmp_path / "gone"))
    assert documents(moved, 10, named) == ["c"]
    fault = fault_of(documents, moved, 10)
    assert fault.key == "check_corpus" and str(tmp_path / "gone") in fault.rule


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


def run_of(run_dir: Path, losses: Sequence[float]) -> None:
    """A run folder with a checkpoint each ten steps."""
    (run_dir / "tokenizer.model").write_bytes(b"t")
    (run_dir / "config_resolved.yaml").write_text(as_yaml(PretrainConfig()), encoding="utf-8")
    state: dict[str, Any] = {"tokenizer_sha256": sha256_of(run_dir / "tokenizer.model")}
    state["shape"] = ModelShape.from_config(PretrainConfig(), 300).as_json()
    for number, loss in enumerate(losses, 1):
        saved(run_dir, 10 * number, loss, **state)
    checkpoint.write_markers(run_dir)


@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize(
    ("file", "losses", "taken", "said"),
    [
        ("global_step20/weights", (2.0, 1.9), 10, "skipping"),
        ("global_step20/manifest.json", (2.0, 1.9), 10, "manifest.json, which is written last, is missing"),
        ("global_step10/weights", (1.0, 1.9), 20, "skipping the best by validation"),
    ],
)
def test_of_a_damaged_run_it_is_said_which_checkpoint_is_taken(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    losses: tuple[float, float],
    taken: int,
    said: str,
    is_changed: bool,
) -> None:
    run_of(tmp_path, losses)
    (lost,) = tmp_path.glob(f"{file}*")
    if is_changed and lost.suffix != ".json":
        content = lost.read_bytes()
        lost.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    else:
        lost.unlink()
    found = checkpoint_source.find(ConvertConfig(input_model_dir=str(tmp_path)))
    assert found.state.step == taken and said in capsys.readouterr().out


def test_what_step_3_has_set_aside_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path, (2.0, 1.9))
    set_aside(tmp_path / "global_step20")
    assert checkpoint_source.find(ConvertConfig(input_model_dir=str(tmp_path))).state.step == 10
    shown = capsys.readouterr().out
    assert "global_step10 is taken" in shown and "global_step20.broken" in shown


VALIDATIONS = {
    "risen": (1.871, 2.02, 2.115),
    "about_as_good": (1.98, 1.99, 1.995),
    "not_finite": (2.5, 2.6, float("nan")),
}


@pytest.mark.parametrize(
    ("losses", "settings", "step"),
    [
        ("risen", {}, 10),
        ("risen", {"checkpoint": "newest"}, 30),
        ("risen", {"average": 2}, 30),  # nobody knows how good the mean is
        ("about_as_good", {}, 30),
        ("not_finite", {}, 10),
    ],
)
def test_the_best_checkpoint_is_taken_where_the_newest_is_much_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], losses: str, settings: dict[str, Any], step: int
) -> None:
    run_of(tmp_path, VALIDATIONS[losses])
    prune(tmp_path, MonitoringSettings(keep_last=2))
    found = checkpoint_source.find(ConvertConfig(input_model_dir=str(tmp_path), **settings))
    assert found.state.step == step
    shown = capsys.readouterr().out
    assert ("global_step10 is exported" in shown) == (step == 10) == ("global_step30" in shown)


def test_a_run_stopped_behind_its_last_validation_goes_by_that(tmp_path: Path) -> None:
    for number, loss in ((10, 1.8), (20, 2.0)):
        saved(tmp_path, number, loss)
    checkpoint.write_markers(tmp_path)
    store.save(tmp_path, replace(state_of(20, 2.0), step=25), {}, {})
    assert checkpoint.is_much_worse(tmp_path / "global_step25")


def test_a_model_from_elsewhere_has_a_prompt_too(tmp_path: Path) -> None:
    assert prompts(tmp_path, ConvertConfig()) == ["1, 2, 3,"]
