"""Machines that have run folders of their own resume together: from one checkpoint, or not at all."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from forked import answers_of
from made_checkpoints import flip_last_byte, state_of

from zerokara.base.errors import RunError
from zerokara.checkpoint import store
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.training import run
from zerokara.training.processes import supervision
from zerokara.training.processes.joining import Processes

SHAPES = {"a.weight": (2, 3), "a.weight.exp_avg": (2, 3), "a.weight.exp_avg_sq": (2, 3)}


def resumed(_: PretrainConfig, folders: list[str]) -> dict[str, Any]:
    """Find the newest checkpoint in one of two processes, each with a folder; answer its step and a weight."""
    rank = torch.distributed.get_rank()
    os.environ[supervision.FOLDER_NAME] = str(rank)
    run.optimizer_rules.checkpoint_shapes = lambda *_: dict(SHAPES)
    shape = SimpleNamespace(parameter_shapes=lambda: ["a.weight"])
    config = SimpleNamespace(optimizer_name="adamw")
    plan: Any = SimpleNamespace(run_dir=Path(folders[rank]), resolved=config, shape=shape)
    try:
        newest = run.newest_checkpoint(plan, Processes(torch.device("cpu"), rank))
    except RunError as error:
        return {"found": str(error)}
    return {"found": newest and [newest[1].step, float(newest[2]["a.weight"][0, 0])]}


def save(folder: Path, value: float, is_damaged: bool = False) -> None:
    """Save a checkpoint of step 20 whose weights are all `value`."""
    of_value = {name: torch.full(shape, value) for name, shape in SHAPES.items()}
    path = store.save(folder, state_of(20), {"a.weight": of_value.pop("a.weight")}, of_value)
    if is_damaged:
        flip_last_byte(path / "weights.safetensors")


def test_they_resume_from_one_checkpoint_or_not_at_all(
    tmp_path: Path, python_path: None, warm_server: Path | None
) -> None:
    whole, damaged = (1.0, False), (1.0, True)
    cases = {
        "here alone": (whole, None),
        "there alone": (None, whole),
        "of two runs": (whole, (2.0, False)),
        "damaged here": (damaged, whole),
        "damaged there": (whole, damaged),
        "damaged, and none here": (None, damaged),
        "none": (None, None),
    }
    jobs: dict[str, dict[str, Any]] = {}
    for name, both in cases.items():
        folders = [tmp_path / name / str(number) for number in (0, 1)]
        for folder, content in zip(folders, both, strict=True):
            folder.mkdir(parents=True)
            if content:
                save(folder, *content)
        jobs[name] = {"processes": 2, "more": {"folders": [str(folder) for folder in folders]}}
    found = answers_of(resumed, jobs, tmp_path, warm_server)
    answers = {name: [each["found"] for each in both] for name, both in found.items()}
    refused = answers.pop("damaged, and none here")
    assert all("no machine has a checkpoint" in each for each in refused)
    assert answers.pop("none") == [None, None]
    assert answers == {name: [[20, 1.0]] * 2 for name in cases if name in answers}
