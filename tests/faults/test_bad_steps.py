"""Losses and gradients that are not finite: the step is skipped, reported, and remembered by a resumed run."""

import itertools
import signal
from pathlib import Path

import pytest
import torch
from faults.running import COMMON, LEFT_OUT, SHORT, Forge, assert_equal, trained_unbroken, whole_checkpoints
from tiny import Trained

from zerokara import checkpoint
from zerokara.config.data import causal
from zerokara.samples.packed_tokens import PackedTokens, read_sources
from zerokara.tokens.indexed import TokenPaths
from zerokara.training.monitoring import step_metrics

BAD = {"nan_at": [8 * 4 + 5, 8 * 9, 8 * 10 + 7]}
"""Sequences of steps 5, 10 and 11."""


@pytest.fixture(scope="module")
def with_bad_steps(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained_unbroken(forge, tmp_path_factory.mktemp("bad") / "run", BAD)


def test_a_bad_batch_is_skipped_and_documents_named(forge: Forge, with_bad_steps: Trained, unbroken: Trained) -> None:
    lines = step_metrics.read(with_bad_steps.folder)
    assert [line["step"] for line in lines if "skipped" in line] == [5, 10, 11]
    assert [line["step"] for line in lines if "loss" in line] == [n for n in range(1, 45) if n not in (5, 10, 11)]
    assert [line["loss"] for line in lines if "loss" in line][:4] == unbroken.losses[:4]
    (sample,) = next(line for line in lines if line.get("skipped") == "the loss is nan")["bad_samples"]
    assert sample["position"] == 37 and sample["loss"] == "nan"
    paths = TokenPaths(forge.settings["output_prefix"])
    sources = read_sources(forge.settings["output_prefix"])
    touched = PackedTokens(paths.train, causal(32)).documents(sample["sample"], 0, sources)
    named = {"source": sources[0].name, "first": touched[0][1], "last": touched[-1][1]}
    assert sample["documents"] == [named]
    state = checkpoint.read_state(with_bad_steps.folder / "global_step44")
    assert (state.step, state.skipped_steps, state.skipped_in_row) == (44, 3, 0)
    assert state.updates == 41 and len(state.recent_losses) == 41
    assert all(weight.isfinite().all() for weight in with_bad_steps.weights.values())


@pytest.mark.slow
def test_killed_and_stopped_and_resumed_around_bad_steps(forge: Forge, with_bad_steps: Trained, tmp_path: Path) -> None:
    """Killed in the saves of steps 6 and 12, stopped by two bad steps in a row between them."""
    run_dir = tmp_path / "run"
    assert forge.run(run_dir, {**BAD, "save": 3, "at_line": 40}, **COMMON) == -signal.SIGKILL, forge.log
    for _ in range(2):  # the second start remembers the bad step before its checkpoint
        assert forge.run(run_dir, BAD, **{**COMMON, "max_skipped_steps": 1}) == 1, forge.log
        assert "step 11" in forge.log and "max_skipped_steps" in forge.log
    assert "--set lr=" in forge.log and "Traceback" not in forge.log
    assert forge.run(run_dir, {**BAD, "save": 1, "at_line": 40}, **COMMON) == -signal.SIGKILL, forge.log
    assert whole_checkpoints(run_dir)[-1] == 10
    assert forge.run(run_dir, BAD, **COMMON) == 0, forge.log
    assert_equal(run_dir, with_bad_steps)


def assert_left_out(run_dir: Path) -> None:
    """See that steps 3 and 5 changed nothing, and the others did."""
    lines = [line for line in step_metrics.read(run_dir) if "skipped" in line]
    skipped = [(line["step"], line["skipped"]) for line in lines]
    assert skipped == [(3, "the loss is nan"), (5, "the gradient is not finite")]
    assert [len(line["bad_samples"]) for line in lines] == [1, 3]
    losses = [sample["loss"] for sample in lines[1]["bad_samples"]]
    assert losses == sorted(losses, reverse=True), "the worst first"
    folders = {step: checkpoint.folder_of(run_dir, step) for step in range(1, 7)}
    now = [dict(checkpoint.read_weights(f)) | dict(checkpoint.read_moments(f)) for f in folders.values()]
    same = [all(torch.equal(one[name], was[name]) for name in was) for was, one in itertools.pairwise(now)]
    assert same == [False, True, False, True, False]
    assert [checkpoint.read_state(folder).updates for folder in folders.values()] == [1, 2, 2, 3, 3, 4]
    assert all(tensor.isfinite().all() for tensor in now[-1].values())


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 0), ("bf16", 0), ("fp8", 0), ("fp32", 1), ("fp32", 3)])
def test_what_is_skipped_changes_nothing(forge: Forge, tmp_path: Path, precision: str, stage: int) -> None:
    settings = {**SHORT, "precision": precision, "zero_stage": stage}
    assert forge.run(tmp_path / "run", LEFT_OUT, **settings) == 0, forge.log
    assert_left_out(tmp_path / "run")


@pytest.mark.slow
def test_two_processes_skip_alike(in_two_processes: dict[str, Trained]) -> None:
    for stage in (1, 2, 3):
        assert_left_out(in_two_processes[f"left_out_{stage}"].folder)
