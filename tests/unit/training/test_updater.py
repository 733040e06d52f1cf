"""Which updater serves a run, and what the plan says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zerokara
from zerokara.training.compute import updater

TEMPLATE = {"zero_optimization": {"overlap_comm": True}, "wall_clock_breakdown": False}


@pytest.mark.parametrize(
    ("zero_stage", "optimizer", "offload", "ranks", "expected"),
    [
        (0, "adamw", "none", 1, "replicated"),
        (0, "adamw", "none", 8, "replicated"),
        (1, "adamw", "none", 1, "replicated"),  # nothing to shard
        (1, "adamw", "none", 2, "zero"),
        (1, "adamw", "optimizer", 1, "zero"),  # offload is DeepSpeed's
        (2, "adamw", "none", 1, "zero"),
        (3, "adamw", "all", 4, "zero"),
        (1, "adafactor", "none", 4, "replicated"),  # needs whole matrices
        (1, "muon", "none", 4, "replicated"),
        (0, "muon", "none", 4, "replicated"),
    ],
)
def test_the_updater_of_a_run(zero_stage: int, optimizer: str, offload: str, ranks: int, expected: str) -> None:
    assert updater.choose(zero_stage, optimizer, offload, ranks) == expected


def test_a_template_without_effect_is_named_with_its_keys() -> None:
    lines = list(updater.plan_lines("replicated", 1, 1, "template.json", TEMPLATE))
    assert len(lines) == 2 and all(word in lines[1] for word in ("template.json", "no effect", *TEMPLATE))
    assert len(list(updater.plan_lines("replicated", 1, 1, "template.json", {}))) == 1, "an empty one is not mentioned"
    (line,) = updater.plan_lines("zero", 3, 4, "template.json", TEMPLATE)
    assert "DeepSpeed" in line and "3" in line and "no effect" not in line


def test_what_is_sharded_is_said_as_it_is() -> None:
    sharded = next(iter(updater.plan_lines("replicated", 1, 4, "template.json", {})))
    alone = next(iter(updater.plan_lines("replicated", 1, 1, "template.json", {})))
    stage_0 = next(iter(updater.plan_lines("replicated", 0, 4, "template.json", {})))
    assert "4 ranks" in sharded and "nothing" in alone and "nothing" in stage_0


def test_a_run_without_zero_does_not_import_deepspeed() -> None:
    code = "import sys, zerokara.training.worker; print([name for name in sys.modules if name.startswith('deepspeed')])"
    environment = {**os.environ, "PYTHONPATH": str(Path(zerokara.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_what_crosses_machines_is_said() -> None:
    plain, told = updater.plan_lines("zero", 2, 16, "template.json", {}, nodes=2, micro_batches=4)
    assert plain == "DeepSpeed's ZeRO, stage 2" and "2 machines for each of 4 micro batches: zero_stage: 1" in told
    for nodes, micro_batches, stage in ((1, 4, 2), (2, 1, 2), (2, 4, 1)):
        assert len(list(updater.plan_lines("zero", stage, 16, "t.json", {}, nodes, micro_batches))) == 1
    template = {"zero_optimization": {"zero_hpz_partition_size": 8}}
    _, hierarchical = updater.plan_lines("zero", 3, 16, "template.json", template, nodes=2, micro_batches=4)
    assert "each 8 ranks" in hierarchical and "template.json switches it off" in hierarchical
