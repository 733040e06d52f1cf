"""Checkpoints appear whole; a broken one is named and skipped; retention keeps what it should."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from configs import fault_of
from made_checkpoints import flip_last_byte, saved

from zerokara import checkpoint
from zerokara.checkpoint import folders
from zerokara.config.engine import MonitoringSettings


@pytest.mark.parametrize(
    ("harm", "file", "word"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "", "manifest.json"),
        (lambda folder: (folder / "weights.safetensors").unlink(), "weights.safetensors", "missing"),
        (lambda folder: (folder / "weights.safetensors").write_bytes(b"x"), "weights.safetensors", "1 bytes"),
        (lambda folder: flip_last_byte(folder / "optimizer.safetensors"), "optimizer.safetensors", "SHA-256"),
    ],
)
def test_a_broken_one_is_skipped_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None], file: str, word: str
) -> None:
    older, newest = saved(tmp_path, 10), saved(tmp_path, 20)
    harm(newest)
    fault = fault_of(checkpoint.check, newest)
    assert fault.where == str(newest / file) and word in fault.rule and "checkpoint" in fault.remedy
    assert checkpoint.newest_complete(tmp_path) == older
    (line,) = capsys.readouterr().out.splitlines()
    assert str(fault) in line


def test_a_manifest_that_leaves_a_file_out_is_broken(tmp_path: Path) -> None:
    manifest = saved(tmp_path, 10) / "manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps({**content, "outputs": {"state": content["outputs"]["state"]}}), encoding="utf-8")
    fault = fault_of(checkpoint.check, manifest.parent)
    assert fault.where == str(manifest) and "weights, optimizer" in fault.rule
    assert checkpoint.newest_complete(tmp_path / "nowhere") is None
    assert fault_of(checkpoint.check, tmp_path / "global_step5").where == str(tmp_path / "global_step5")


def names(folders: list[Path]) -> list[str]:
    return [folder.name for folder in folders]


def test_pruning_keeps_the_newest_and_the_multiples(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        saved(tmp_path, step)
    deleted = folders.prune(tmp_path, MonitoringSettings(keep_last=2, keep_every=20, keep_best=False))
    assert names(deleted) == ["global_step10", "global_step30"]
    assert checkpoint.all_steps(tmp_path) == [20, 40, 50]


def test_losses_on_another_text_are_not_compared(tmp_path: Path) -> None:
    for step, loss, text in ((10, 1.0, "old"), (20, 3.0, "new"), (30, 4.0, "new")):
        facts = {"valid_loss": loss, "valid_step": step, checkpoint.VALID_FACT: text}
        newest = saved(tmp_path, step, facts=facts)
    checkpoint.write_markers(tmp_path)
    assert (tmp_path / "best").read_text(encoding="utf-8") == "global_step20\n" and checkpoint.is_much_worse(newest)


def test_pruning_keeps_the_best_by_validation(tmp_path: Path) -> None:
    for step, loss in ((10, 3.0), (20, 2.0), (30, None), (40, 2.0), (50, 4.0), (60, float("nan"))):
        state = checkpoint.read_state(saved(tmp_path, step, loss))
        assert replace(state, step=step + 1).selection_loss is None, "of an earlier validation, not of these weights"
    checkpoint.write_markers(tmp_path)
    assert (tmp_path / "best").read_text(encoding="utf-8") == "global_step40\n"  # the newer of two as good
    assert names(folders.prune(tmp_path, MonitoringSettings(keep_last=1))) == [
        "global_step10", "global_step20", "global_step30", "global_step50",
    ]  # fmt: skip
    folders.prune(tmp_path, MonitoringSettings(keep_last=1, keep_best=False))
    checkpoint.write_markers(tmp_path)
    assert checkpoint.all_steps(tmp_path) == [60] and not (tmp_path / "best").exists()
    assert (tmp_path / "latest").read_text(encoding="utf-8") == "global_step60\n"


def test_what_is_broken_never_counts_as_kept_and_stays(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        saved(tmp_path, step)
    (tmp_path / "global_step30" / "weights.safetensors").write_bytes(b"x")
    assert names(folders.prune(tmp_path, MonitoringSettings(keep_last=1, keep_best=False))) == ["global_step10"]
    checkpoint.write_markers(tmp_path)
    assert (tmp_path / "latest").read_text(encoding="utf-8") == "global_step20\n"
    (tmp_path / "global_step20" / "state.json").unlink()
    assert folders.prune(tmp_path, MonitoringSettings(keep_last=1, keep_best=False)) == [], "nothing whole stands"
    assert checkpoint.all_steps(tmp_path) == [20, 30]
