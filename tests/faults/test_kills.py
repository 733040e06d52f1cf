"""kill -9 at any moment: the same command goes on, and ends as the run that nothing befell, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from faults.running import COMMON, Fault, Forge, assert_equal, wait_for, whole_checkpoints
from tiny import Trained

from zerokara import checkpoint


def test_killed_inside_saves(
    forge: Forge, unbroken: Trained, lines_of_a_save: int, num_kills: int, tmp_path: Path
) -> None:
    """The kill comes before a line of our code that is drawn among all that a save runs."""
    chance, tried, runs = random.Random(1), 0, 0
    total = round(num_kills * 0.7)
    while tried < total:
        run_dir, runs = tmp_path / f"run{runs}", runs + 1
        while tried < total:
            fault = {"save": chance.choice((1, 2, 2)), "at_line": chance.randint(1, lines_of_a_save)}
            with Fault("kill -9 before a line inside a save"):
                code = forge.run(run_dir, fault, **COMMON)
                assert code in (0, -signal.SIGKILL), forge.words
                whole_checkpoints(run_dir)
            tried += 1
            if not code:
                break
        assert forge.run(run_dir, **COMMON) == 0, forge.words
        assert_equal(run_dir, unbroken)


def test_killed_at_random_moments(forge: Forge, unbroken: Trained, num_kills: int, tmp_path: Path) -> None:
    """The kill comes from outside, at a time that is drawn: in the start, in a step, in a validation, in a save."""
    chance, total, tried, runs = random.Random(2), num_kills - round(num_kills * 0.7), 0, 0
    while tried < total:
        run_dir, runs = tmp_path / f"run{runs}", runs + 1
        ended = False
        while tried < total and not ended:
            with Fault("kill -9 at a random moment"):
                forge.start(run_dir, **COMMON)
                time.sleep(chance.uniform(0.1, 2.5))
                ended = forge.kill() == 0
                whole_checkpoints(run_dir)
            tried += 1
        assert forge.run(run_dir, **COMMON) == 0, forge.words
        assert_equal(run_dir, unbroken)


PARTS = ("weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def test_a_broken_newest_checkpoint(forge: Forge, unbroken: Trained, tmp_path: Path) -> None:
    """What the newest was is trained again, from the one before; the broken one goes when a new one stands."""
    run_dir = tmp_path / "run"
    assert forge.run(run_dir, {"save": 3, "at_line": 1}, **COMMON) == -signal.SIGKILL
    for harm, kind in ((_truncate, "truncated"), (_flip, "changed"), (Path.unlink, "deleted")):
        for part in PARTS:
            with Fault(f"a file of the newest checkpoint {kind}"):
                before = whole_checkpoints(run_dir)
                newest = checkpoint.folder_of(run_dir, before[-1])
                harm(newest / part)
                # The third save is killed before it begins: the first writes the broken one anew, the second is new.
                assert forge.run(run_dir, {"save": 3, "at_line": 1}, **COMMON) in (0, -signal.SIGKILL), forge.words
                assert f"skipping {newest}" in forge.words
                assert f"going on from {checkpoint.folder_of(run_dir, before[-2])}" in forge.words
                assert whole_checkpoints(run_dir)[-1] == before[-1] + 2
    assert forge.run(run_dir, **COMMON) == 0, forge.words
    assert_equal(run_dir, unbroken)


def test_the_only_good_checkpoint_is_never_pruned(forge: Forge, unbroken: Trained, tmp_path: Path) -> None:
    run_dir, settings = tmp_path / "run", {**COMMON, "keep_last": 1, "keep_best": False}
    assert forge.run(run_dir, {"save": 5, "at_line": 1}, **{**settings, "keep_last": 2}) == -signal.SIGKILL
    with Fault("the newest checkpoint broken where one is kept"):
        _flip(run_dir / "global_step8" / "weights.safetensors")
        # Saved at every step now: the first new one is older than the broken one.
        sooner = {**settings, "save_interval": 1}
        assert forge.run(run_dir, {"save": 1, "at_line": 1}, **sooner) == -signal.SIGKILL
        assert checkpoint.all_steps(run_dir) == [6, 8]  # nothing new stands, so nothing goes
        assert forge.run(run_dir, {"save": 2, "at_line": 1}, **sooner) == -signal.SIGKILL
        assert whole_checkpoints(run_dir) == [7]
    assert forge.run(run_dir, **settings) == 0, forge.words
    assert_equal(run_dir, unbroken)


@pytest.mark.parametrize(
    "leftover", ["latest names nothing", "latest is missing", "partial folders", "half a deletion"]
)
def test_leftovers(forge: Forge, unbroken: Trained, tmp_path: Path, leftover: str) -> None:
    run_dir = tmp_path / "run"
    assert forge.run(run_dir, {"save": 4, "at_line": 1}, **COMMON) == -signal.SIGKILL
    with Fault(f"leftovers: {leftover}"):
        if leftover == "latest names nothing":
            (run_dir / "latest").write_text("global_step999\n", encoding="utf-8")
        elif leftover == "latest is missing":
            (run_dir / "latest").unlink()
        elif leftover == "partial folders":
            for name in ("global_step8.partial", "global_step2.old.partial"):
                (run_dir / name).mkdir()
                (run_dir / name / "weights.safetensors").write_bytes(b"x")
            (run_dir / "metrics.jsonl.123.partial").write_bytes(b"x")
        else:
            (run_dir / "global_step4" / "manifest.json").unlink()
        assert forge.run(run_dir, {"save": 2, "at_line": 1}, **COMMON) == -signal.SIGKILL
        assert (run_dir / "latest").read_text(encoding="utf-8") == "global_step8\n"
        assert not list(run_dir.glob("*.partial")) and whole_checkpoints(run_dir) == [6, 8]
    assert forge.run(run_dir, **COMMON) == 0, forge.words
    assert_equal(run_dir, unbroken)


def test_two_never_train_in_one_folder(forge: Forge, unbroken: Trained, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Fault("killed while it holds the lock"):
        forge.start(run_dir, {"slow_saves": 30}, **COMMON)
        wait_for(lambda: "step 2/" in forge.words)
        assert forge.kill() == -signal.SIGKILL
        assert forge.run(run_dir, **COMMON) == 0  # the lock died with its owner
        assert_equal(run_dir, unbroken)


def test_counted_lines_are_those_of_a_save(unbroken: Trained, lines_of_a_save: int) -> None:
    counts = json.loads((unbroken.folder.parent / "lines.json").read_text(encoding="utf-8"))
    assert len(counts) == 22 and lines_of_a_save > 300
