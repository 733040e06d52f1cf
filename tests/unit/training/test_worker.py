"""What a training process does with its plan, and how it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.training import worker
from zerokara.training.planning.run_plan import make_plan
from zerokara.training.processes import supervision


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (None, 0, ""),
        (MemoryError(), supervision.OUT_OF_MEMORY, "out of memory in process 0 of 1, at micro_batch_size"),
        (RuntimeError(f"[enforce] {worker._CPU_ALLOCATOR}"), supervision.OUT_OF_MEMORY, "out of memory"),
        (RuntimeError("[gloo/transport/tcp/pair.cc] closed by peer"), supervision.LOST_CONNECTION, "lost the others"),
    ],
)
def test_it_says_why_it_leaves_and_destroys_the_process_groups_at_the_end_alone(
    tiny_data: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException | None,
    code: int,
    message: str,
) -> None:
    destroyed: list[bool] = []

    def work(*_: Any) -> None:
        assert not destroyed
        if error:
            raise error

    plan = make_plan(load(PretrainConfig, tiny_data["config"], []), 1).with_settings(precision="fp32")
    plan.write(tmp_path / "plan.json")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: destroyed.append(True))
    assert worker.main([str(tmp_path / "plan.json"), "work"], work={"work": work}) == code
    assert message in capsys.readouterr().err and destroyed == ([] if error else [True])
