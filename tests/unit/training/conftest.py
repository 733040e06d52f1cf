from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.training.monitoring import step_metrics
from zerokara.training.planning.run_plan import RunPlan, make_plan


@pytest.fixture
def plan_of(tiny_data: dict[str, str], tmp_path: Path) -> Callable[..., RunPlan]:
    """Return a function that plans a run of the tiny model in the folder `run`."""

    def make(*overrides: str, processes: int | None = 1, **how: Any) -> RunPlan:
        settings = [f"output_model_dir={tmp_path / 'run'}", *overrides]
        plan = make_plan(load(PretrainConfig, tiny_data["config"], settings), **how)
        return plan if processes in (None, plan.num_processes) else plan.on_processes(processes)

    return make


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr(step_metrics, "log", logged.append)
    return logged
