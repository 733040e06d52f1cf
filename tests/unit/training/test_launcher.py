"""Requests to stop reach the training processes; a killed one is reported with the evidence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from zerokara.training.processes import launcher

LAUNCHER = """
import subprocess, sys
children = [subprocess.Popen([sys.executable, "-c", program, sys.argv[1]]) for program in sys.argv[2:]]
print("started", flush=True)
for child in children:
    child.wait()
"""
"""Starts training processes, as DeepSpeed's does."""
TRAINER = """
import os, pathlib, signal, sys, time
def heard(number, frame):
    (pathlib.Path(sys.argv[1]) / str(os.getpid())).write_text(signal.Signals(number).name)
    os._exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, heard)
(pathlib.Path(sys.argv[1]) / f"{os.getpid()}.ready").touch()
time.sleep(60)
"""
LOADING = "import pathlib, sys, time; (pathlib.Path(sys.argv[1]) / 'loading.ready').touch(); time.sleep(60)"


@pytest.mark.parametrize(
    ("number", "heard"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGTERM")]
)
def test_training_processes_hear_what_was_asked_once_they_listen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals, heard: str
) -> None:
    """Before that they would die of a Ctrl-C with a traceback: SIGTERM ends them silently."""
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), TRAINER, TRAINER, LOADING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as started:
        assert started.stdout and started.stdout.readline() == b"started\n"
        while len(list(tmp_path.glob("*.ready"))) < 3:
            assert started.poll() is None
        with launcher.SignalForwarding(started.pid) as forwarding:
            os.kill(os.getpid(), number)
            started.wait(30)
        assert forwarding.requested
    assert [path.read_text(encoding="utf-8") for path in tmp_path.iterdir() if path.suffix == ""] == [heard, heard]
    output = capfd.readouterr()
    assert "end of this step" in output.out and "KeyboardInterrupt" not in output.err


def test_a_launcher_that_has_started_nothing_yet_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as started, launcher.SignalForwarding(started.pid):
        os.kill(os.getpid(), signal.SIGINT)
        assert started.wait(30) == -signal.SIGTERM
    assert not psutil.pid_exists(started.pid) and "before the first step" in capfd.readouterr().out


@pytest.mark.parametrize(("before", "after", "word"), [(3, 4, " 1 "), (3, 3, "outside"), (None, None, "dmesg")])
def test_a_killed_process_is_reported_with_the_evidence(
    before: int | None, after: int | None, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "num_oom_kills", lambda: after)
    assert word in launcher.kill_message(before)


def test_the_exit_codes_of_a_kill() -> None:
    assert [code for code in range(-20, 256) if launcher.is_kill(code)] == [-9, 137, 247]
