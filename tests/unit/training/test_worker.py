"""What a training process does with its plan, and how it leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import RunError
from zerokara.training import worker
from zerokara.training.planning.run_plan import RunPlan, make_plan


@pytest.fixture
def plan(tiny_data: dict[str, str]) -> RunPlan:
    return make_plan(load(PretrainConfig, tiny_data["config"], []), 1, "fp32")


@pytest.mark.parametrize("error", [None, RunError("no disk"), SystemExit(1)])
def test_the_process_groups_are_destroyed_at_the_end_and_not_after_a_failure(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    destroyed: list[bool] = []

    def trial(*_: Any) -> None:
        assert not destroyed
        if error:
            raise error

    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: destroyed.append(True))
    if error:
        with pytest.raises(type(error)):
            worker.explained(trial, plan)
    else:
        worker.explained(trial, plan)
    assert destroyed == ([] if error else [True])
