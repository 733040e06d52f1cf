"""A request to stop, wherever the run is: it saves at the end of the step, and the same command resumes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from faults.running import COMMON, Fault, Forge, assert_equal, wait_for, whole_checkpoints
from tiny import Trained

from zerokara.training.monitoring import step_metrics


@pytest.mark.parametrize("where", ["step", "validation", "sampling", "save"])
def test_sigterm_is_obeyed_at_the_edge_of_a_step(forge: Forge, unbroken: Trained, tmp_path: Path, where: str) -> None:
    run_dir = tmp_path / "run"
    settings = {**COMMON, "sample_prompts": "[ab]", "sample_tokens": 4} if where == "sampling" else COMMON
    with Fault(f"SIGTERM in a {where}"):
        fault = {"signal": {"number": signal.SIGTERM, "where": where}}
        assert forge.run(run_dir, fault, **settings) == 0, forge.log
        assert "SIGTERM" in forge.log
        stopped = forge.values("step")[-1]
        assert stopped < 20 and whole_checkpoints(run_dir)[-1] == stopped
        if where == "validation":  # it was given up, and is made up for
            validated = [line["step"] for line in step_metrics.read(run_dir) if "valid_loss" in line]
            assert stopped == 8 and validated == [0]
    assert forge.run(run_dir, **settings) == 0, forge.log
    assert_equal(run_dir, unbroken)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_the_first_step_there_is_nothing_to_wait_for(
    forge: Forge, unbroken: Trained, tmp_path: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    with Fault("SIGTERM or Ctrl-C in the start"):
        assert forge.run(run_dir, {"signal": {"number": number, "where": "start"}}, **COMMON) == 130, forge.log
        assert not forge.values("step") and "Traceback" not in forge.log
    assert forge.run(run_dir, **COMMON) == 0, forge.log
    assert_equal(run_dir, unbroken)


def test_a_second_ctrl_c_leaves_at_once(forge: Forge, unbroken: Trained, tmp_path: Path) -> None:
    """Even while a save is being written, which never ends here."""
    run_dir = tmp_path / "run"
    with Fault("Ctrl-C twice"):
        fault = {
            "signal": {"number": signal.SIGINT, "where": "step", "at_step": 3, "again": True},
            "hold": [{"at_step": 2, "what": "save", "exists": "/never"}],
        }
        started = time.monotonic()
        assert forge.run(run_dir, fault, **COMMON) == 130, forge.log
        assert time.monotonic() - started < 30  # it is held for a minute
        assert not forge.values("saved") and not whole_checkpoints(run_dir)
    assert forge.run(run_dir, **COMMON) == 0, forge.log
    assert_equal(run_dir, unbroken)


def test_a_file_called_stop(forge: Forge, unbroken: Trained, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Fault("the file STOP"):
        forge.start(run_dir, {"hold": [{"at_step": 4, "exists": str(run_dir / "STOP")}]}, **COMMON)
        wait_for(lambda: 3 in forge.values("step"))
        (run_dir / "STOP").touch()
        assert forge.wait() == 0, forge.log
        assert f"{run_dir}/STOP" in forge.log
        # The fourth step is held after the sum in which all look: the file came before it, or is seen in the fifth.
        assert not (run_dir / "STOP").exists() and whole_checkpoints(run_dir)[-1] in (4, 5)
        (run_dir / "STOP").touch()  # while nobody trains: it speaks of an earlier start
    assert forge.run(run_dir, **COMMON) == 0, forge.log
    assert_equal(run_dir, unbroken)


def test_the_next_save_waits_for_the_one_before_and_the_end_for_the_last(
    forge: Forge, unbroken: Trained, tmp_path: Path
) -> None:
    """Each save is held until the training waits for it."""
    run_dir = tmp_path / "run"
    with Fault("a disk slower than the steps"):
        fault = {
            "reminder_seconds": 0.2,
            "hold": [
                {"at_step": 22, "what": "save", "event": {"save": 44}, "seconds": 1.2},
                {"at_step": 44, "what": "save", "event": {"finishing": True}, "seconds": 0.6},
            ],
        }
        assert forge.run(run_dir, fault, **{**COMMON, "save_interval": 22}) == 0, forge.log
        assert [event for event in forge.events if "step" not in event] == [
            {"resumed": None}, {"save": 22}, {"save": 44}, {"saved": 22}, {"finishing": True}, {"saved": 44},
        ]  # fmt: skip
        assert "step 22  checkpoint not saved yet, still being written" in forge.log and "save_interval" in forge.log
        assert "step 44  checkpoint not saved yet" in forge.log
    assert_equal(run_dir, unbroken)
