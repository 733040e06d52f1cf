"""Checkpoints appear whole; a broken one is named and skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zerokara import checkpoint
from zerokara.checkpoint import TrainingState
from zerokara.errors import UserError


def saved(run_dir: Path, step: int) -> Path:
    state = TrainingState(
        step=step, samples=step * 8, tokens=step * 256, seconds=1.5, shape={"num_layers": 1}, tokenizer_sha256="t",
        data_sha256="d", precision="bf16", facts={"loss": 2.0},
    )  # fmt: skip
    weights = {"a.weight": torch.full((2, 3), float(step))}
    moments = {"a.weight.exp_avg": torch.zeros(2, 3), "a.weight.exp_avg_sq": torch.ones(2, 3)}
    return checkpoint.save(run_dir, state, weights, moments)


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    folder = saved(tmp_path, 10)
    assert folder.name == "global_step10"
    assert (tmp_path / "latest").read_text(encoding="utf-8") == "global_step10\n"
    assert checkpoint.read_state(folder).samples == 80
    assert torch.equal(checkpoint.read_weights(folder)["a.weight"], torch.full((2, 3), 10.0))
    assert checkpoint.read_moments(folder).keys() == {"a.weight.exp_avg", "a.weight.exp_avg_sq"}
    assert checkpoint.newest_complete(tmp_path) == folder


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "is a half-written checkpoint: manifest.json is missing"),
        (lambda folder: (folder / "weights.safetensors").unlink(), "is missing from the checkpoint"),
        (lambda folder: (folder / "weights.safetensors").write_bytes(b"x"), "has 1 bytes where the checkpoint was"),
        (lambda folder: _flip_last_byte(folder / "optimizer.safetensors"), "was changed after the checkpoint was"),
    ],
)
def test_a_broken_newest_is_skipped_with_a_word(tmp_path: Path, harm, words: str) -> None:  # type: ignore[no-untyped-def]
    older, newest = saved(tmp_path, 10), saved(tmp_path, 20)
    harm(newest)
    with pytest.raises(UserError, match=words):
        checkpoint.check(newest)
    told: list[str] = []
    assert checkpoint.newest_complete(tmp_path, told.append) == older
    assert len(told) == 1 and words in told[0] and "skipping" in told[0]


def _flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.newest_complete(tmp_path) is None
    with pytest.raises(UserError, match="there is no such checkpoint"):
        checkpoint.check(tmp_path / "global_step5")


def test_pruning_keeps_the_newest_and_the_multiples(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        saved(tmp_path, step)
    deleted = checkpoint.prune(tmp_path, keep_last=2, keep_every=20)
    assert [folder.name for folder in deleted] == ["global_step10", "global_step30"]
    assert checkpoint.all_steps(tmp_path) == [20, 40, 50]


def test_a_half_written_folder_of_a_killed_save_does_not_count(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    (tmp_path / "global_step20.partial").mkdir()
    assert checkpoint.all_steps(tmp_path) == [10]
    checkpoint.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step10", "latest"]
