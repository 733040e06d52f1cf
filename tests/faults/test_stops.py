"""A request to stop, wherever the run is: it saves at the end of the step, and the same command resumes."""

import signal
import time
from pathlib import Path

import pytest
from faults.running import COMMON, Forge, assert_equal, wait_for, whole_checkpoints
from tiny import Trained

from zerokara.base.errors import RunError
from zerokara.training.monitoring import step_metrics
from zerokara.training.planning import run_folder


@pytest.mark.slow
def test_whenever_a_run_is_asked_to_stop_it_resumes(forge: Forge, unbroken: Trained, tmp_path: Path) -> None:
    """One run is stopped again and again: in its start and by a second Ctrl-C at once, then at the edge of a step."""
    run_dir, settings = tmp_path / "run", {**COMMON, "sample_prompts": "[ab]", "sample_tokens": 4}
    for number in (signal.SIGTERM, signal.SIGINT):
        assert forge.run(run_dir, {"signal": {"number": number, "where": "start"}}, **settings) == 130, forge.log
        assert not forge.values("step") and "Traceback" not in forge.log
    # while a save is being written, which never ends here
    twice = {"number": signal.SIGINT, "where": "step", "at_step": 3, "again": True}
    started = time.monotonic()
    fault = {"signal": twice, "hold": [{"at_step": 2, "what": "save", "exists": "/never"}]}
    assert forge.run(run_dir, fault, **settings) == 130, forge.log
    assert time.monotonic() - started < 50  # it is held for a minute
    assert not forge.values("saved") and not whole_checkpoints(run_dir)
    for where in ("step", "validation", "sampling", "save"):
        assert forge.run(run_dir, {"signal": {"number": signal.SIGTERM, "where": where}}, **settings) == 0, forge.log
        stopped = forge.values("step")[-1]
        assert "SIGTERM" in forge.log and whole_checkpoints(run_dir)[-1] == stopped < 24
        if where == "validation":  # it was given up, and is made up for
            validated = [line["step"] for line in step_metrics.read(run_dir) if "valid_loss" in line]
            assert stopped == 8 and validated == [0]
    assert forge.run(run_dir, **settings) == 0, forge.log
    assert_equal(run_dir, unbroken)


def test_a_file_called_stop(forge: Forge, unbroken: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 1)
    run_dir = tmp_path / "run"
    forge.start(run_dir, {"hold": [{"at_step": 4, "exists": str(run_dir / "STOP")}]}, **COMMON)
    wait_for(lambda: 3 in forge.values("step"))
    with pytest.raises(RunError, match="another process is training here"), run_folder.training_lock(run_dir):
        raise AssertionError("it must not begin")
    (run_dir / "STOP").touch()
    assert forge.wait() == 0, forge.log
    assert f"{run_dir}/STOP" in forge.log
    # The fourth step is held after the sum in which all look: the file came before it, or is seen in the fifth.
    assert not (run_dir / "STOP").exists() and whole_checkpoints(run_dir)[-1] in (4, 5)
    # no user but root may make the thread that saves less nice
    assert forge.run(run_dir, {"nice": 19}, **COMMON) == 0, forge.log
    assert_equal(run_dir, unbroken)


def test_a_save_waits_for_the_one_before_the_end_for_the_last(forge: Forge, unbroken: Trained, tmp_path: Path) -> None:
    """Each save is held until the training waits for it."""
    run_dir = tmp_path / "run"
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
