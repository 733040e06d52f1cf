"""Real Slurm (Debian's slurmctld, slurmd and slurm-client) on the hosts of these tests: ``sbatch 3_train.sbatch``.

A cluster of one's own on two namespaces: no munge (auth/none), no cgroups (proctrack/linuxproc).
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.hosts import OWN, Host, cluster
from tiny import ROOT

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sacct")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
USER_NAMESPACE = Path("/proc/self/setgroups").read_text(encoding="utf-8").strip() == "deny"
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurmctld slurmd slurm-client"),
    pytest.mark.skipif(USER_NAMESPACE, reason="Slurm's daemons change their groups, which root alone may"),
]

CONFIG = """
ClusterName=test
SlurmctldHost=host-0(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={own}/state
SlurmdSpoolDir={own}/spool
SlurmctldPidFile={own}/slurmctld.pid
SlurmdPidFile={own}/slurmd.pid
SlurmctldLogFile={own}/slurmctld.log
SlurmdLogFile={own}/slurmd.log
KillWait=20
MinJobAge=300
NodeName=host-0 NodeAddr=10.77.0.1 CPUs=1 State=UNKNOWN
NodeName=host-1 NodeAddr=10.77.0.2 CPUs=1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts with Slurm."""
    config = tmp_path / "slurm.conf"
    config.write_text(CONFIG.format(own=OWN), encoding="utf-8")
    with cluster(2) as hosts:
        daemons = []
        for host in hosts:
            host.run("mkdir", "-p", f"{OWN}/state", f"{OWN}/spool")
            if host.number == 0:
                daemons.append(host.start("slurmctld", "-D", "-f", str(config), log=tmp_path / "slurmctld.log"))
        time.sleep(2)
        for host in hosts:
            command = ("slurmd", "-D", "-f", str(config), "-N", host.name)
            daemons.append(host.start(*command, log=tmp_path / f"slurmd-{host.number}.log"))
        wait_for(lambda: "idle" in ask(hosts[0], config, "sinfo", "-h", "-o", "%T"), tmp_path)
        yield hosts
        for daemon in daemons:
            daemon.terminate()


def ask(host: Host, config: Path, *command: str) -> str:
    """What a command of Slurm's says."""
    return host.run("env", f"SLURM_CONF={config}", *command)


def wait_for(holds: object, logs: Path, seconds: float = 120) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        said = "\n".join(path.read_text(errors="replace")[-3000:] for path in logs.glob("*.log"))
        assert time.monotonic() < deadline, said
        time.sleep(0.5)


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
