"""The proof of resume: what it compares, what it calls equal, and what it refuses. Real runs: tests/pipeline."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from configs import fault_of

from zerokara.base.errors import RunError
from zerokara.checkpoint import TrainingState, store
from zerokara.training import resume_proof
from zerokara.training.planning.run_plan import RunPlan


def write_run(run_dir: Path, losses: dict[int, float], steps: list[int], change: float = 0.0) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in losses.items()]
    (run_dir / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    for step in steps:
        weights = {"w": torch.full((10,), 1.0 + step) + change * (torch.arange(10) == 3)}
        state = TrainingState(step, 8 * step, 256 * step, 1.0, {}, "t", "d", "fp32", {})
        store.save(run_dir, state, weights, {"w.exp_avg": 2 * weights["w"]})


LOSSES = {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.5}


@pytest.fixture
def plan(plan_of: Callable[..., RunPlan]) -> RunPlan:
    return plan_of("num_processes=1", "micro_batch_size=4").with_settings(precision="fp32")


def training(change: float, losses: dict[int, float] = LOSSES) -> Callable[..., int]:
    """What stands in for the processes: runs of 2 · 2 steps, of which the resumed one ends otherwise."""

    def train(plan: RunPlan, what: str, last_step: str, path: Path) -> int:
        run_dir, step = plan.run_dir, int(last_step)
        assert what == "prove" and path.is_file()
        if run_dir.name == "unbroken":
            write_run(run_dir, LOSSES, [4])
        else:
            write_run(run_dir, losses, [step], change if step == 4 else 0)
        return 0

    return train


@pytest.mark.parametrize(
    ("processes", "change", "loss"), [(1, 1e-6, 1.5), (1, 0.0, 1.5000001), (2, 1e-3, 1.51), (2, 3.0, 1.5)]
)
def test_difference(plan: RunPlan, monkeypatch: pytest.MonkeyPatch, processes: int, change: float, loss: float) -> None:
    """One process on a CPU must give equal bits; several are allowed a tolerance."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(resume_proof, "spawn", training(change, {**LOSSES, 4: loss}))
    object.__setattr__(plan, "num_processes", processes)
    with pytest.raises(RunError, match="NOT exact"):
        resume_proof.prove(plan, 2)
    assert not list(plan.run_dir.parent.iterdir())


def test_a_tolerance_is_told(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resume_proof, "spawn", training(1e-3, {**LOSSES, 4: 1.50001}))
    object.__setattr__(plan, "num_processes", 2)
    resume_proof.prove(plan, 2)
    shown = capsys.readouterr().out
    assert "proved" in shown and "0.0001" in shown and "0.1;" in shown


def test_a_run_that_is_too_short_is_told(plan: RunPlan) -> None:
    fault = fault_of(resume_proof.prove, plan, 11)
    assert (fault.where, fault.value) == ("--verify-resume", 11) and "20" in fault.rule and "10" in fault.remedy


def test_a_training_that_fails_proves_nothing(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_proof, "spawn", lambda *_, **__: 1)
    with pytest.raises(RunError, match="exit code 1"):
        resume_proof.prove(plan, 2)
