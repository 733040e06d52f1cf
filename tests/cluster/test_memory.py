"""A save costs each process no more than its share of the checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest
from programs import launch

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.training.planning import run_folder
from zerokara.training.planning.run_plan import PLAN_NAME, make_plan

SETTINGS = (
    "num_layers=6", "hidden_size=512", "num_attn_heads=8", "num_kv_heads=8", "train_tokens=512", "save_interval=1",
    "keep_last=1", "max_steps=2", "global_batch_size=8", "micro_batch_size=1", "optimizer=adamw", "eval_tokens=100",
)  # fmt: skip
SPARE_BYTES = 60e6
"""Beside the share: the largest tensor, gathered, and buffers of the writing."""


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_save_costs_a_process_its_share(data: dict[str, str], tmp_path: Path, processes: int, stage: int) -> None:
    given = [*SETTINGS, f"num_processes={processes}", f"zero_stage={stage}", f"output_model_dir={tmp_path / 'run'}"]
    plan = make_plan(load(PretrainConfig, data["config"], given), processes).with_settings(precision="fp32")
    run_folder.claim(plan)
    arguments = [str(tmp_path), str(plan.run_dir / PLAN_NAME)]
    here = str(Path(__file__).parent)
    with mock.patch.dict(
        os.environ, {"PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    ):
        assert launch("measured_saves", arguments, processes) == 0
    share = plan.checkpoint_bytes / processes
    grown = []
    for rank in range(processes):
        first, *_ = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        grown.append(first[1] - first[0])
    print(
        f"{processes} processes, ZeRO {stage}: a checkpoint of {plan.checkpoint_bytes / 1e6:.0f} MB, share "
        f"{share / 1e6:.0f} MB, the first save took at most {max(grown) / 1e6:.0f} MB more in a process"
    )
    assert max(grown) <= share + SPARE_BYTES
