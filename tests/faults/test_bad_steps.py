"""Losses and gradients that are not finite: the step is skipped, told, and remembered by a resumed run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from faults.running import COMMON, Fault, Forge, assert_equal, trained_unbroken, whole_checkpoints
from tiny import Trained

from zerokara import checkpoint
from zerokara.samples.documents import SampleDocuments
from zerokara.samples.packed import PackedTokens
from zerokara.samples.sources import read_sources
from zerokara.tokens.layout import TokenPaths
from zerokara.training import metrics

BAD = {"nan_at": [8 * 4 + 5, 8 * 9, 8 * 10 + 7]}
"""Sequences of steps 5, 10 and 11."""


@pytest.fixture(scope="module")
def with_bad_steps(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run whose batches hold bad sequences, otherwise unbroken."""
    return trained_unbroken(forge, tmp_path_factory.mktemp("bad") / "run", BAD)


def test_a_bad_batch_is_skipped_and_its_documents_named(
    forge: Forge, with_bad_steps: Trained, unbroken: Trained
) -> None:
    with Fault("a batch whose loss is nan", 3):
        lines = metrics.read(with_bad_steps.folder)
        assert [line["step"] for line in lines if "skipped" in line] == [5, 10, 11]
        assert [line["step"] for line in lines if "loss" in line] == [n for n in range(1, 45) if n not in (5, 10, 11)]
        assert [line["loss"] for line in lines if "loss" in line][:4] == unbroken.losses[:4]
        (suspect,) = next(line for line in lines if line.get("skipped") == "the loss is nan")["suspects"]
        assert suspect["position"] == 37 and suspect["loss"] == "nan"
        paths = TokenPaths(forge.settings["output_prefix"])
        sources = read_sources(forge.settings["output_prefix"])
        touched = SampleDocuments(PackedTokens(paths.train, 32), sources).touched_by(suspect["sample"])
        named = {"source": sources[0].name, "first": touched[0].document, "last": touched[-1].document}
        assert suspect["documents"] == [named]
        state = checkpoint.read_state(with_bad_steps.folder / "global_step44")
        assert (state.step, state.skipped_steps, state.skipped_in_row) == (44, 3, 0)
        assert state.updates == 41 and len(state.recent_losses) == 41
        assert all(weight.isfinite().all() for weight in with_bad_steps.weights.values())


def test_killed_and_resumed_around_bad_steps(forge: Forge, with_bad_steps: Trained, tmp_path: Path) -> None:
    with Fault("a batch whose loss is nan, and kills around it", 3):
        # Killed in the saves of steps 6 and then 12, between the two bad steps in a row and their successor.
        for save in (3, 4):
            fault = {**BAD, "save": save, "at_line": 40}
            assert forge.run(tmp_path / "run", fault, **COMMON) == -signal.SIGKILL, forge.words
        assert whole_checkpoints(tmp_path / "run")[-1] == 10
        assert forge.run(tmp_path / "run", BAD, **COMMON) == 0, forge.words
        assert_equal(tmp_path / "run", with_bad_steps)


def test_an_infinite_gradient_is_skipped_as_if_it_had_not_been(forge: Forge, tmp_path: Path) -> None:
    settings = {**COMMON, "keep_last": 100}
    with Fault("a gradient that is not finite"):
        assert forge.run(tmp_path / "run", {"wild_at": [6]}, **settings) == 0, forge.words
        before, after = (checkpoint.folder_of(tmp_path / "run", step) for step in (4, 6))
        assert checkpoint.read_state(after).updates == 5
        (line,) = [line for line in metrics.read(tmp_path / "run") if "skipped" in line]
        assert line["skipped"] == "the gradient is not finite" and len(line["suspects"]) == 3
        weights, moments = checkpoint.read_weights(after), checkpoint.read_moments(after)
        assert all(tensor.isfinite().all() for tensor in [*weights.values(), *moments.values()])
        assert not torch.equal(*(checkpoint.read_weights(folder)["output_layer.weight"] for folder in (before, after)))


def test_too_many_in_a_row_stop_the_run_at_the_last_good_checkpoint(
    forge: Forge, with_bad_steps: Trained, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with Fault("more bad batches in a row than max_skipped_steps"):
        assert forge.run(run_dir, BAD, **{**COMMON, "max_skipped_steps": 1}) == 1
        assert "failed: step 11: the loss is nan; 2 skipped in a row, and max_skipped_steps is 1" in forge.words
        assert "--set lr=" in forge.words and "Traceback" not in forge.words
        assert whole_checkpoints(run_dir)[-1] == 10
    assert forge.run(run_dir, BAD, **COMMON) == 0, forge.words
    assert_equal(run_dir, with_bad_steps)
