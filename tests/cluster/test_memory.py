"""A save costs each process no more than its share of the checkpoint: tests that start this file as a training process.

As such it writes FOLDER/RANK.json: the bytes resident before the first save, and the most until it was written. The
peak is the kernel's own (VmHWM), which is set back before each save (``5`` in /proc/self/clear_refs, proc(5)).
"""

import gc
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from programs import launch

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.training import worker
from zerokara.training.planning import run_folder
from zerokara.training.planning.run_plan import PLAN_NAME, make_plan
from zerokara.training.saving import Saver

SETTINGS = (
    "num_layers=6", "hidden_size=512", "num_attn_heads=8", "num_kv_heads=8", "train_tokens=512", "save_interval=1",
    "keep_last=1", "max_steps=2", "global_batch_size=8", "micro_batch_size=1", "optimizer=adamw", "eval_tokens=100",
)  # fmt: skip
SPARE_BYTES = 60e6
"""Beside the share: the largest tensor, gathered, and buffers of the writing."""


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_save_costs_a_process_its_share(data: dict[str, str], tmp_path: Path, processes: int, stage: int) -> None:
    settings = [*SETTINGS, f"num_processes={processes}", f"zero_stage={stage}", f"output_model_dir={tmp_path / 'run'}"]
    plan = (
        make_plan(load(PretrainConfig, data["config"], settings))
        .on_processes(processes)
        .with_settings(precision="fp32")
    )
    run_folder.claim(plan)
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / "support"), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}):
        assert launch("test_memory", [str(tmp_path), str(plan.run_dir / PLAN_NAME)], processes) == 0
    memory = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]
    share, grown = plan.checkpoint_bytes / processes, max(peak - before for before, peak in memory)
    print(f"{processes} processes, ZeRO {stage}: share {share / 1e6:.0f} MB, the first save took {grown / 1e6:.0f} MB")
    assert grown <= share + SPARE_BYTES


def main(arguments: Sequence[str]) -> int:
    folder, plan = Path(arguments[0]), arguments[1]
    save = Saver.save

    def resident(name: str) -> int:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(re.findall(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)[0])

    def measured(self: Saver, state: Any) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before = resident("VmRSS")
        save(self, state)
        self._current.result()
        if not (path := folder / f"{os.environ['RANK']}.json").exists():
            path.write_text(json.dumps([before, resident("VmHWM")]), encoding="utf-8")

    Saver.save = measured  # type: ignore[method-assign]
    return worker.main([plan, "train"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
