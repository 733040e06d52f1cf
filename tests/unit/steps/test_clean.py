"""Folders that `--redo` has set aside: listed with their sizes; deleted only on request, and only if they are ours."""

import json
import shutil
from pathlib import Path

import pytest

from zerokara import manifest
from zerokara.huggingface.exported_folder import STEP
from zerokara.steps import clean


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.old-*")}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for run in ("models/it.old-1", "models/deep/it.old-12", "models/it", ".venv/it.old-1"):
        (tmp_path / run / "global_step5").mkdir(parents=True)
        (tmp_path / run / "run.json").write_text("{}", encoding="utf-8")
        (tmp_path / run / "global_step5" / "weights").write_bytes(b"x" * 3000)
    for export, step in (("hf.old-1", STEP), ("hf.old-2", STEP), ("tokenizer.old-1", "train_tokenizer")):
        folder = tmp_path / "models" / export
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x" * 2000)
        made = {"weights": [folder / "model.safetensors"]}
        manifest.write(folder / "manifest.json", manifest.StepSpec(step, {}), made, {}, 1.0)
    (tmp_path / "models" / "hf.old-2" / "notes.txt").write_text("mine", encoding="utf-8")
    for theirs in ("models/site.old-1", "models/photos.old-3"):
        (tmp_path / theirs).mkdir()
    (tmp_path / "models" / "site.old-1" / "manifest.json").write_text(json.dumps({"name": "a page"}), encoding="utf-8")
    (tmp_path / "models" / "link.old-1").symlink_to(tmp_path / "models" / "it")
    return tmp_path


def test_listing_deletes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = names(place)
    assert clean.main([str(place)]) == 0
    said = capsys.readouterr().out
    for found in ("models/it.old-1", "models/deep/it.old-12", "models/hf.old-1", "models/hf.old-2; kept for notes.txt"):
        assert f"  {place / found}\n" in said
    assert said.count(str(place)) == 4 and "--delete" in said and names(place) == before


def test_only_what_is_ours_is_deleted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, rmtree = names(place), shutil.rmtree
    with monkeypatch.context() as stopped:  # in the middle of a folder
        stopped.setattr(shutil, "rmtree", lambda path: (rmtree(path), (_ for _ in ()).throw(KeyboardInterrupt)))
        assert clean.main([str(place), "--delete"]) == 130
    assert names(place) == before - {"models/hf.old-1"}  # which holds no folder
    assert clean.main([str(place), "--delete"]) == 0
    gone = {"models/it.old-1", "models/deep/it.old-12", "models/hf.old-1"}
    assert names(place) == before - gone and (place / "models/it/run.json").exists()
    assert (place / "models/hf.old-2/model.safetensors").exists()


def test_a_folder_that_is_not_there_is_an_error(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert clean.main([str(place), str(place / "model")]) == 2
    assert f"no such folder; the nearest name is {place / 'models'}" in capsys.readouterr().err
