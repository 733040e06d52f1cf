"""How the cores are shared by training processes on a CPU, and what a user's own environment has to say about it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from zerokara import resources
from zerokara.training.planning import cores
from zerokara.training.processes import launcher


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Eight cores, nothing set by the user, and a control group without limits."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(resources, "control_groups", lambda: iter([tmp_path]))
    return tmp_path


def test_cores_are_shared_out() -> None:
    assert [cores.threads(processes) for processes in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert cores.environment(2) == {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize(("given", "expected"), [("3", 3), ("16", 16), ("5,2", 5), ("0", 4), ("many", 4), ("", 4)])
def test_the_users_number_of_threads_is_taken(monkeypatch: pytest.MonkeyPatch, given: str, expected: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert cores.threads(2) == expected
    assert cores.environment(2)["OMP_NUM_THREADS"] == (given or "4")


@pytest.mark.parametrize(
    ("batch_tokens", "threads", "expected"),
    [
        (16 * 2048, "", [8, 4, 2, 1]),
        (5 * 2048, "", [4, 2, 1]),
        (2047 * 2, "", [1]),
        (16 * 2048, "4", [2, 1]),
        (16 * 2048, "16", [1]),
    ],
)
def test_processes_share_the_cores_of_a_step_that_is_large_enough(
    monkeypatch: pytest.MonkeyPatch, batch_tokens: int, threads: str, expected: list[int]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert cores.process_counts(batch_tokens) == expected


def test_the_users_way_of_waiting_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert cores.environment(1)["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}])
def test_training_processes_are_started_with_it(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    """It must stand in the environment before torch is loaded: later nothing reads it."""
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    started, popen = [], subprocess.Popen

    def start(command: list[str], env: dict[str, str], **others: object) -> subprocess.Popen:
        started.append(env)
        return popen(["true"])

    monkeypatch.setattr(subprocess, "Popen", start)
    assert launcher.launch("module", [], 2) == 0
    expected = {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE", **given}
    assert {name: started[0][name] for name in expected} == expected


@pytest.mark.parametrize("given", ["", "ACTIVE"])
def test_step_4_computes_with_it(tmp_path: Path, root: Path, given: str) -> None:
    """Its script sets it: Python finds it there, and reads `sitecustomize` before anything else."""
    told = "import os, pathlib; pathlib.Path(__file__).with_name('told').write_text(os.environ['OMP_WAIT_POLICY'])"
    (tmp_path / "sitecustomize.py").write_text(told, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_WAIT_POLICY": given}
    subprocess.run(["bash", root / "4_convert_to_HF.sh", "--help"], env=environment, check=True, capture_output=True)
    assert (tmp_path / "told").read_text(encoding="utf-8") == (given or "PASSIVE")
