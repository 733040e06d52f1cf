"""kill -9 at any moment: the same command resumes, and ends as the run without a fault, bit for bit."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from faults.running import COMMON, Forge, Kills, assert_equal, whole_checkpoints
from made_checkpoints import flip_last_byte
from tiny import Trained

from zerokara import checkpoint
from zerokara.training.monitoring import step_metrics


@pytest.fixture
def kills(forge: Forge, unbroken: Trained, tmp_path: Path) -> Kills:
    return Kills(forge, unbroken, tmp_path)


def test_killed_inside_saves(forge: Forge, kills: Kills, lines_of_a_save: int, num_kills: int) -> None:
    """The kill comes before a line of our code that is drawn among all that a save runs."""
    chance = random.Random(1)

    def kill(run_dir: Path) -> int:
        fault = {"save": chance.choice((1, 2, 2)), "at_line": chance.randint(1, lines_of_a_save)}
        return forge.run(run_dir, fault, **COMMON)

    kills.survive(round(num_kills * 0.7), kill)


def test_killed_at_random_moments(forge: Forge, kills: Kills, unbroken_seconds: float, num_kills: int) -> None:
    """The kill comes from outside, at a time that is drawn: in the start, in a step, in a validation, in a save."""
    chance = random.Random(2)

    def kill(run_dir: Path) -> int:
        forge.start(run_dir, **COMMON)
        time.sleep(chance.uniform(0, 0.8 * unbroken_seconds))
        return forge.kill()

    kills.survive(num_kills - round(num_kills * 0.7), kill)


PARTS = ("weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def test_broken_newest_checkpoints(forge: Forge, unbroken: Trained, tmp_path: Path) -> None:
    """Each part of the newest four is broken; what they were is trained again, and the broken ones are kept aside."""
    run_dir, settings = tmp_path / "run", {**COMMON, "keep_last": 6}
    assert forge.run(run_dir, {"save": 6, "at_line": 1}, **settings) == -signal.SIGKILL
    for harm in (_truncate, flip_last_byte, Path.unlink):
        before, broken = whole_checkpoints(run_dir), checkpoint.broken_names(run_dir)
        for step, part in zip(before[-4:], PARTS, strict=True):
            harm(checkpoint.folder_of(run_dir, step) / part)
        # Four are saved again, and one is new; the sixth save is killed before it begins.
        assert forge.run(run_dir, {"save": 6, "at_line": 1}, **settings) == -signal.SIGKILL, forge.log
        assert forge.values("resumed") == [before[-5]]
        assert len(checkpoint.broken_names(run_dir)) == len(broken) + len(PARTS)
        assert whole_checkpoints(run_dir)[-6:] == [*before[-5:], before[-1] + 2]
    assert forge.run(run_dir, **COMMON) == 0, forge.log
    assert_equal(run_dir, unbroken)


def test_the_faults_come_where_they_should(unbroken: Trained, lines_of_a_save: int) -> None:
    """Lines are counted in all saves, and the run crosses the edge of an epoch."""
    counts = json.loads((unbroken.folder.parent / "lines.json").read_text(encoding="utf-8"))
    assert len(counts) == 22 and lines_of_a_save > 300
    assert step_metrics.read(unbroken.folder)[-2]["epoch"] > 1.1
