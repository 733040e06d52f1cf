"""What is seen before a run starts: its data, a process that does not answer, one for which the others wait."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import UserError
from zerokara.tokens.layout import bin_path
from zerokara.training.planning import plan_rows, run_plan

ROOT = Path(__file__).resolve().parents[3]


def prepared(tiny_data: dict[str, str], *overrides: str) -> run_plan.RunPlan:
    return run_plan.make_plan(load(PretrainConfig, tiny_data["config"], [*overrides]), 1, "fp32")


def test_the_head_of_the_data_is_shown_as_text(tiny_data: dict[str, str]) -> None:
    plan = prepared(tiny_data)
    rows = dict(plan_rows.data_rows(plan))
    shown = rows["data begins"].partition(" = ")[2].strip("'")
    assert len(shown) > 20 and shown in Path(tiny_data["input_jsonl"]).read_text(encoding="utf-8")
    assert rows["tokenizer"].startswith(f"sha256 {plan.encoder.sha256[:12]}")


@pytest.mark.parametrize("place", [3, -3])
def test_an_id_that_the_tokenizer_lacks_is_found(tiny_data: dict[str, str], tmp_path: Path, place: int) -> None:
    source = Path(tiny_data["output_prefix"])
    for path in source.parent.glob(f"{source.name}*"):
        shutil.copyfile(path, tmp_path / path.name)
    plan = prepared(tiny_data, f"output_prefix={tmp_path / source.name}")
    ids = np.memmap(bin_path(plan.data.train_prefix), np.uint16, mode="r+")
    ids[place] = 500  # the pieces are 0 to 499
    ids.flush()
    with pytest.raises(UserError, match=r" 500; .* 500 .*--redo"):
        plan_rows.data_rows(plan)


SILENT = """
import os, sys, time
import torch.distributed
from zerokara.errors import RunError
from zerokara.training.processes import joining
joining.ANSWER_SECONDS = 2
rank = 0 if os.fork() else 1
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
if rank == 1:
    time.sleep(60)
try:
    joining.require_answers()
except RunError as error:
    print(error, flush=True)
    os._exit(3)
"""


def test_a_process_that_does_not_answer_is_named(tmp_path: Path) -> None:
    program = [sys.executable, "-c", SILENT, str(tmp_path / "rendezvous")]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    words = next(line for line in process.stdout if "processes answered" in line)
    assert process.wait(timeout=30) == 3
    os.killpg(process.pid, signal.SIGKILL)  # the one that sleeps
    assert "2 processes" in words and "1" in words.partition("s: ")[2]


SLOW = """
import datetime, os, sys, time
import torch, torch.distributed
from zerokara.errors import RunError
from zerokara.training.processes import joining
rank = 0 if os.fork() else 1
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=2)
)
joining.HEARTBEAT_SECONDS = float(sys.argv[2])
processes = joining.Processes(torch.device("cpu"), rank)
def tell(what):
    os.write(1, f"{rank} {what}\\n".encode())  # whole lines: two processes write
def work():
    time.sleep(5)
    return 7
def fail():
    raise RunError("no disk")
try:
    tell(processes.from_first(work))
    processes.from_first(fail)
except RunError as error:
    tell(error)
    os.wait()
except SystemExit as end:
    tell(f"leaves with {end.code}")
"""


@pytest.mark.parametrize("heartbeat", [0.5, 60.0])
def test_the_others_wait_for_as_long_as_the_first_process_is_alive(tmp_path: Path, heartbeat: float) -> None:
    """Its work takes longer than a collective may."""
    program = [sys.executable, "-c", SLOW, str(tmp_path / "rendezvous"), str(heartbeat)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    if heartbeat < 2:
        assert sorted(done.stdout.splitlines()) == ["0 7", "0 no disk", "1 7", "1 leaves with 1"]
    else:
        assert "1 7" not in done.stdout, "without a heartbeat the wait ends in an error"
