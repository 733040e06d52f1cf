"""Real Slurm (Debian's slurmctld, slurmd and slurm-client) on the hosts of these tests.

A cluster of one's own on two namespaces: no munge (auth/none), no cgroups (proctrack/linuxproc).
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster.hosts import OWN, Host, cluster

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sacct")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
USER_NAMESPACE = Path("/proc/self/setgroups").read_text(encoding="utf-8").strip() == "deny"
NEEDED = [
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
SlurmdParameters=config_overrides
SlurmdTimeout=10
StateSaveLocation={own}/state
SlurmdSpoolDir={own}/spool
SlurmctldPidFile={own}/slurmctld.pid
SlurmdPidFile={own}/slurmd.pid
SlurmctldLogFile={own}/slurmctld.log
SlurmdLogFile={own}/slurmd.log
KillWait=20
MinJobAge=300
NodeName=host-0 NodeAddr=10.77.0.1 CPUs=16 RealMemory=64000 State=UNKNOWN
NodeName=host-1 NodeAddr=10.77.0.2 CPUs=16 RealMemory=64000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""Each node says that it has what a job file asks for; a job gets a whole one."""


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[list[Host]]:
    """Two hosts with Slurm, as long as the block lasts; its configuration is ``slurm.conf`` in this folder."""
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(own=OWN), encoding="utf-8")
    with cluster(2) as hosts:
        daemons = []
        for host in hosts:
            host.run("mkdir", "-p", f"{OWN}/state", f"{OWN}/spool")
            if host.number == 0:
                daemons.append(host.start("slurmctld", "-D", "-f", str(config), log=folder / "slurmctld.log"))
        time.sleep(2)
        for host in hosts:
            command = ("slurmd", "-D", "-f", str(config), "-N", host.name)
            daemons.append(host.start(*command, log=folder / f"slurmd-{host.number}.log"))
        wait_for(lambda: ask(hosts[0], config, "sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"], folder)
        yield hosts
        for daemon in daemons:
            daemon.terminate()


def ask(host: Host, config: Path, *command: str) -> str:
    return host.run("env", f"SLURM_CONF={config}", *command)


def wait_for(holds: Callable[[], object], logs: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        said = "\n".join(path.read_text(errors="replace")[-3000:] for path in logs.glob("*.log"))
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
