"""Being asked to stop, wherever the run is: saved at a step's edge, and the same command goes on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from faults.running import COMMON, Fault, Forge, assert_equal, wait_for, whole_checkpoints
from tiny import Trained


@pytest.mark.parametrize("where", ["step", "validation", "sampling", "save"])
def test_sigterm_is_obeyed_at_the_edge_of_a_step(forge: Forge, unbroken: Trained, tmp_path: Path, where: str) -> None:
    run_dir = tmp_path / "run"
    settings = {**COMMON, "sample_prompts": "[ab]", "sample_tokens": 4} if where == "sampling" else COMMON
    with Fault(f"SIGTERM in a {where}"):
        fault = {"signal": {"number": signal.SIGTERM, "where": where}}
        assert forge.run(run_dir, fault, **settings) == 0, forge.words
        assert "stopped by SIGTERM after step" in forge.words
        stopped = int(forge.words.split("stopped by SIGTERM after step ")[1].split(",")[0])
        assert stopped < 20 and whole_checkpoints(run_dir)[-1] == stopped
        if where == "validation":  # it was given up, and is made up for
            assert stopped == 8 and f"step {stopped}  validation" not in forge.words
    assert forge.run(run_dir, **settings) == 0, forge.words
    assert_equal(run_dir, unbroken)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_the_first_step_there_is_nothing_to_wait_for(
    forge: Forge, unbroken: Trained, tmp_path: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    with Fault("SIGTERM or Ctrl-C in the start"):
        assert forge.run(run_dir, {"signal": {"number": number, "where": "start"}}, **COMMON) == 130, forge.words
        assert "step 1/" not in forge.words and forge.words.splitlines()[-1] == "stopped"
    assert forge.run(run_dir, **COMMON) == 0, forge.words
    assert_equal(run_dir, unbroken)


def test_a_second_ctrl_c_leaves_at_once(forge: Forge, unbroken: Trained, tmp_path: Path) -> None:
    """Even while a save is being written, which never ends here."""
    run_dir = tmp_path / "run"
    with Fault("Ctrl-C twice"):
        fault = {
            "signal": {"number": signal.SIGINT, "where": "step", "at_step": 3, "again": True},
            "hold": [{"at_step": 2, "what": "save", "there": "/never"}],
        }
        started = time.monotonic()
        assert forge.run(run_dir, fault, **COMMON) == 130, forge.words
        assert time.monotonic() - started < 30  # it is held for a minute
        assert "saved; run" not in forge.words and not whole_checkpoints(run_dir)
    assert forge.run(run_dir, **COMMON) == 0, forge.words
    assert_equal(run_dir, unbroken)


def test_a_file_called_stop(forge: Forge, unbroken: Trained, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Fault("the file STOP"):
        forge.start(run_dir, {"hold": [{"at_step": 4, "there": str(run_dir / "STOP")}]}, **COMMON)
        wait_for(lambda: "step 3/" in forge.words)
        (run_dir / "STOP").touch()
        assert forge.wait() == 0, forge.words
        assert f"stopped by the file {run_dir}/STOP after step" in forge.words
        # The fourth step is held after the sum in which all look: the file came before it, or is seen in the fifth.
        assert not (run_dir / "STOP").exists() and whole_checkpoints(run_dir)[-1] in (4, 5)
        (run_dir / "STOP").touch()  # while nobody trains: it speaks of an earlier start
    assert forge.run(run_dir, **COMMON) == 0, forge.words
    assert_equal(run_dir, unbroken)


def test_the_next_save_waits_for_the_one_before_and_the_end_for_the_last(
    forge: Forge, unbroken: Trained, tmp_path: Path
) -> None:
    """Each save is held until somebody says that he waits for it."""
    run_dir = tmp_path / "run"
    waiting = "step 44  waiting for the checkpoint of step 22 to be written, since"
    last = "the checkpoint of step 44 is not yet saved, being written"
    with Fault("a disk slower than the steps"):
        fault = {
            "word_seconds": 0.2,
            "hold": [
                {"at_step": 22, "what": "save", "words": waiting, "seconds": 1},
                {"at_step": 44, "what": "save", "words": last},
            ],
        }
        assert forge.run(run_dir, fault, **{**COMMON, "save_interval": 22}) == 0, forge.words
        assert "for the checkpoint of step 22 to be written: save_interval is short for this disk" in forge.words
    assert_equal(run_dir, unbroken)
