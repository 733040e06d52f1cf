"""What is looked at before a run starts: hours, disk, data; and processes that do not answer, or wait for the first."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import config_of

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import Fault
from zerokara.progress import bytes_text
from zerokara.tokens.indexed import bin_path
from zerokara.training import launching
from zerokara.training.planning import run_plan, schedule
from zerokara.training.planning.processors import PARENT_NAME
from zerokara.training.planning.run_folder import EarlierRun
from zerokara.training.run import state_of

ROOT = Path(__file__).resolve().parents[3]


def prepared(tiny_data: dict[str, str], *overrides: str) -> run_plan.RunPlan:
    return run_plan.make_plan(load(PretrainConfig, tiny_data["config"], [*overrides]), 1).with_settings(
        precision="fp32"
    )


def test_the_head_of_the_data_is_shown_as_text(tiny_data: dict[str, str]) -> None:
    plan = prepared(tiny_data)
    rows = dict(plan.with_settings(micro_batch_size=1).rows())
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
    (fault,) = plan.faults()
    assert re.search(r" 500; .* 500 .*--redo", str(fault))
    assert not list(prepared(tiny_data).faults())


def hours_fault(trained_seconds: float, checkpoint_bytes: int, **settings: Any) -> Fault:
    take = "bash convert.sh --config it.yaml"
    (fault,) = schedule.hours_faults(config_of(**settings), checkpoint_bytes, trained_seconds, take)
    return fault


def test_a_run_that_has_had_its_hours_is_refused() -> None:
    given = config_of(max_hours=2, max_hours_per_start=0.1)
    assert not list(schedule.hours_faults(given, int(1e9), trained_seconds=7199, take=""))
    fault = hours_fault(7205, 0, max_hours=2)
    assert (fault.key, fault.value) == ("max_hours", 2.0)
    assert "bash convert.sh --config it.yaml" in fault.remedy


def test_a_start_without_time_to_train_and_save_is_refused() -> None:
    fault = hours_fault(0, int(1e9), max_hours_per_start=0.01)
    assert (fault.key, fault.value) == ("max_hours_per_start", 0.01)
    assert "40.0 s" in fault.rule


def limit_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 0, free))


def test_checkpoints_that_will_not_fit_are_told_in_numbers(
    tiny_data: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = (f"output_model_dir={tmp_path / 'run'}", "save_interval=2", "keep_last=2", "optimizer=adamw")
    plan = prepared(tiny_data, *given)
    limit_disk(monkeypatch, 1_000_000)
    (fault,) = plan.faults()
    each = 12 * plan.shape.num_parameters()
    # The two newest, the one that is being written, and the best.
    numbers = ("4 of", bytes_text(each), bytes_text(4 * each), "1.0 MB")
    assert fault.key == "output_model_dir" and all(number in fault.rule for number in numbers)
    assert "save_interval: 20 fits" in fault.remedy
    limit_disk(monkeypatch, 10**12)
    assert not list(plan.faults())
    limit_disk(monkeypatch, each - 1)
    assert "not even one checkpoint fits" in str(*plan.faults())


@pytest.mark.parametrize("room", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("kept", [(), ("keep_every=2",), ("keep_best=false",)])
def test_the_save_interval_that_is_advised_fits(
    tiny_data: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room: int, kept: tuple[str, ...]
) -> None:
    given = (f"output_model_dir={tmp_path / 'run'}", "save_interval=2", "keep_last=4", *kept)
    plan = prepared(tiny_data, *given)
    limit_disk(monkeypatch, room * plan.checkpoint_bytes)
    faults = list(plan.faults())
    assert bool(faults) == (plan.max_checkpoints > room)
    if faults:
        found = re.search(r"save_interval: (\d+) fits", faults[0].remedy)
        assert found
        advised = (f"save_interval={found[1]}", "keep_every=0", "keep_best=false")
        assert not list(prepared(tiny_data, *given, *advised).faults())


def test_a_longer_run_announces_that_its_learning_rate_rises(tiny_data: dict[str, str]) -> None:
    plan = prepared(tiny_data, "lr=1.0", "min_lr=0.1", "max_epochs_per_source=1000")

    def told(before: float) -> list[str]:
        state = state_of(plan, 40, step=5, seconds=1.0, facts={"learning_rate": before})
        return list(launching.changed_choices(plan, EarlierRun([5], state, {}, {}, ended_at=None)))

    now = plan.schedule.learning_rate(5)
    assert told(now) == []
    (message,) = told(0.1)
    assert "rises from 1.00e-01 at step 5" in message and f"{now:.2e}" in message
    assert "falls" in told(2.0)[0]


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
joining.TIMEOUT = datetime.timedelta(seconds=2)
processes = joining.Processes(torch.device("cpu"), rank)
def tell(what):
    os.write(1, f"{rank} {what}\\n".encode())  # whole lines: two processes write
def work():
    time.sleep(5)
    return "7"
def fail():
    raise RunError("no disk")
try:
    tell(processes.from_one(work))
    processes.from_one(fail)
except RunError as error:
    tell(error)
    os.wait()
except SystemExit as end:
    tell(f"leaves with {end.code}")
"""


@pytest.mark.parametrize(
    ("launcher", "heard"), [({}, ["1 7", "1 leaves with 1"]), ({PARENT_NAME: "0"}, ["1 leaves with 1"])]
)
def test_the_others_wait_for_as_long_as_the_launcher_is_alive(
    tmp_path: Path, launcher: dict[str, str], heard: list[str]
) -> None:
    """The first one's work takes longer than a collective may; where the launcher is gone, too, they end."""
    program = [sys.executable, "-c", SLOW, str(tmp_path / "rendezvous")]
    environment = os.environ | launcher
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120, env=environment)
    assert sorted(done.stdout.splitlines()) == ["0 7", "0 no disk", *heard]
