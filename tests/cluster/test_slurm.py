"""``sbatch 3_train.sbatch`` on real Slurm."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.hosts import Host
from cluster.slurm import NEEDED, ask, slurm_cluster, wait_for
from tiny import ROOT

pytestmark = NEEDED


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[list[Host]]:
    with slurm_cluster(tmp_path) as hosts:
        yield hosts


def test_a_job_trains_on_two_nodes_and_goes_back_into_the_queue(
    slurm: list[Host], data: dict[str, str], tmp_path: Path
) -> None:
    """At the signal that comes before the time limit the run saves, the job is requeued, and the run ends at last."""
    config, log, run = tmp_path / "slurm.conf", tmp_path / "job.log", tmp_path / "run"
    settings = {
        "output_model_dir": str(run), "num_processes": "1", "train_tokens": str(1500 * 8 * 32), "save_interval": "50",
        "max_epochs_per_source": "100",
    }  # fmt: skip
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    options = ("--nodes=2", "--gpus-per-node=0", f"--output={log}", f"--chdir={ROOT}", "--export=ALL")
    submitted = ask(
        slurm[0], config, "sbatch", "--parsable", *options, "3_train.sbatch", "--config", data["config"], *given
    )
    job = submitted.strip()
    wait_for(lambda: log.exists() and "step 60/" in log.read_text(encoding="utf-8"), tmp_path)
    ask(slurm[0], config, "scancel", "--batch", "--signal=USR1", job)
    wait_for(
        lambda: (
            log.exists()
            and "saved" in log.read_text(encoding="utf-8")
            and "stopped by" in log.read_text(encoding="utf-8")
        ),
        tmp_path,
    )
    wait_for(lambda: "Restarts=1" in ask(slurm[0], config, "scontrol", "show", "job", job), tmp_path, 200)
    # Slurm lets a requeued job wait for two minutes.
    ask(slurm[0], config, "scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(lambda: "trained " in log.read_text(encoding="utf-8").split("resuming from")[-1], tmp_path, 240)
    assert "resuming from" in log.read_text(encoding="utf-8")
    wait_for(lambda: "COMPLETED" in ask(slurm[0], config, "scontrol", "show", "job", job), tmp_path)
    assert subprocess.run(["ls", str(run / "manifest.json")], check=False).returncode == 0
