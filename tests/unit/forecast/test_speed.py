"""Plans that differ from the user's configuration; the steps that are measured are real ones in tests/pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerokara.config.architectures import SIZES
from zerokara.errors import UserError
from zerokara.forecast import speed as module
from zerokara.forecast.fit import SmallRuns
from zerokara.forecast.speed import Planner, size_settings
from zerokara.training.planning.memory import TrialResult
from zerokara.training.planning.run_plan import RunPlan


@pytest.fixture
def planner(tiny_data: dict[str, str], tmp_path: Path) -> Planner:
    return Planner(Path(tiny_data["config"]), (f"output_model_dir={tmp_path / 'run'}", "precision=fp32"))


def test_a_size_takes_the_place_of_the_users(planner: Planner) -> None:
    local = planner.local_plan(**size_settings("3M"))
    assert (local.shape.num_layers, local.shape.hidden_size) == (5, 192)
    assert planner.local_plan().shape.hidden_size == 48  # the configuration's own
    with pytest.raises(UserError, match="model_size"):
        planner.config(hidden_size="auto")


def test_two_sizes_are_tried_and_their_tokens_counted(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def steps(plan) -> tuple[RunPlan, TrialResult]:  # type: ignore[no-untyped-def]
        seconds_of_token = 1e-5 + 1e-11 * plan.shape.flops_per_token()
        tried.append((plan.resolved.model_size, plan.shape.hidden_size, plan.resolved.precision))
        return plan, TrialResult(1, seconds_of_token * plan.schedule.batch_tokens)

    monkeypatch.setattr(module, "try_steps", steps)
    speed = planner.measure_speed()
    assert speed.seconds_per_token == pytest.approx(1e-5) and speed.seconds_per_flop == pytest.approx(1e-11)
    assert tried == [(size, SIZES[size].hidden_size, "fp32") for size in ("1M", "10M")]


def test_what_does_not_fit_is_seen(planner: Planner) -> None:
    (small, small_fits), (large, large_fits) = planner.memory("1M"), planner.memory("13B")
    assert small_fits and not large_fits and large > 13e9 * 12 > small


def test_a_small_run_is_one_process_with_the_optimizer_of_the_large_one(tiny_data: dict[str, str]) -> None:
    given = ("tensor_parallel_size=2", "num_processes=2", "micro_batch_size=2", "precision=fp32")
    planner = Planner(Path(tiny_data["config"]), given)
    assert SmallRuns(planner, Path()).settings["optimizer"] == "adamw"  # Muon needs whole matrices
    small = planner.local_plan(**SmallRuns(planner, Path()).settings)
    assert (small.num_processes, small.resolved.tensor_parallel_size, small.resolved.optimizer) == (1, 1, "adamw")
    assert SmallRuns(Planner(Path(tiny_data["config"]), ()), Path()).settings["optimizer"] == "muon"
