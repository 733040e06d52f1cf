"""The command as a person runs it, with two processes: killed whole, killed in part, asked to stop; and going on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from faults.running import COMMON, Fault, wait_for, whole_checkpoints
from tiny import ROOT

from zerokara import checkpoint
from zerokara.training import metrics


def start(config: str, run_dir: Path) -> subprocess.Popen[str]:
    command = ["bash", str(ROOT / "3_train_node1.sh"), "--config", config]
    settings = {
        **COMMON,
        "train_tokens": 120 * 8 * 32,
        "num_processes": 2,
        "zero_stage": 2,
        "output_model_dir": run_dir,
    }
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def trainers(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """Rank → training process."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "RANK" in child.environ():
                found[int(child.environ()["RANK"])] = child
        except psutil.Error:
            continue
    return found


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics.read(run_dir) if "loss" in line]


def test_two_processes_killed_and_asked_and_going_on(tiny_data: dict[str, str], tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    whole = start(tiny_data["config"], unbroken)
    output, _ = whole.communicate(timeout=240)
    assert whole.returncode == 0, output
    chance = random.Random(3)
    for whom in ("all", "rank 1", "rank 0", "asked"):
        with Fault(f"bash 3_train_node1.sh, two processes, {'SIGTERM' if whom == 'asked' else f'kill -9 of {whom}'}"):
            before = checkpoint.all_steps(broken)[-1:]
            process = start(tiny_data["config"], broken)
            further = chance.randint(2, 12) + (before or [0])[0]
            wait_for(lambda: (checkpoint.all_steps(broken) or [0])[-1] >= further, 120)  # noqa: B023
            if whom == "all":
                everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                for one in everyone:
                    one.kill()
                psutil.wait_procs(everyone)
            elif whom == "asked":
                os.kill(process.pid, signal.SIGTERM)
            else:
                trainers(process)[int(whom[-1])].kill()
            output, _ = process.communicate(timeout=120)
            assert process.returncode == {"all": -signal.SIGKILL, "asked": 130}.get(whom, 1), output
            assert "saved; run the same command" in output or whom != "asked"
            whole_checkpoints(broken)
    last = start(tiny_data["config"], broken)
    output, _ = last.communicate(timeout=240)
    assert last.returncode == 0, output
    assert "going on from" in output
    # Two processes add up in an order that the network may change: not bit for bit.
    assert losses(broken) == pytest.approx(losses(unbroken), abs=1e-5) and len(losses(broken)) == 120
