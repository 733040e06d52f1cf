"""Steps 2 and 3 on real Slurm (Debian's slurmctld, slurmd and slurm-client), and step 2 on real Ray.

Slurm is a cluster of one's own on two namespaces: no munge (auth/none), no cgroups (proctrack/linuxproc). Step 2 gives
the bytes of one machine, also where a machine is lost half-way.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster.hosts import OWN, Host, cluster
from configs import typed
from tiny import ROOT

WORDS = "the sea ice melts in spring and 春 の 海 終日 のたり かな ¡olé! don't stop"
SHARD = "[0-9]*-[0-9]*.json"
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sacct")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
USER_NAMESPACE = Path("/proc/self/setgroups").read_text(encoding="utf-8").strip() == "deny"
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


def _lines(megabytes: float, seed: int) -> bytes:
    random, lines, size = Random(seed), [], 0
    while size < megabytes * 1e6:
        text = " ".join(random.choices(WORDS.split(), k=400))
        lines.append(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
        size += len(lines[-1])
    return b"".join(lines) + b"{broken\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Entries of every kind of task, some 40 MB: lines, a packing in blocks, many small files, row groups."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.jsonl").write_bytes(_lines(15, 1))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(_lines(15, 2), 1))
    (folder / "c").mkdir()
    for number in range(300):
        (folder / "c" / f"{number:03d}.txt").write_text(f"file {number}\nof text\n" * 300, encoding="utf-8")
    rows = [json.loads(line)["text"] for line in _lines(10, 4).splitlines()[:-1]]
    pq.write_table(pa.table({"text": rows}), folder / "d.parquet", row_group_size=500)
    return [str(folder / name) for name in ("a.jsonl", "b.jsonl.gz", "c", "d.parquet")]


@pytest.fixture(scope="module")
def settings(data: dict[str, str], text: list[str]) -> list[str]:
    options = typed(input_jsonl=f"[{', '.join(text)}]", num_workers=1)
    return ["bash", "2_tokenize.sh", "--config", data["config"], *options]


@pytest.fixture(scope="module")
def expected(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("one")
    subprocess.run([*settings, "--set", f"output_prefix={folder}/tokens"], cwd=ROOT, check=True, capture_output=True)
    return written(folder)


def written(folder: Path) -> dict[str, bytes]:
    """All files but the manifest, which has times in it."""
    return {path.name: path.read_bytes() for path in folder.glob("tokens*") if path.suffix != ".json"}


def wait_for(holds: Callable[[], object], logs: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        output = "\n".join(path.read_text(errors="replace")[-3000:] for path in logs.glob("*.log"))
        assert time.monotonic() < deadline, output
        time.sleep(0.05)


class Tokenizing:
    """Step 2 in parts, by commands on one host."""

    def __init__(self, host: Host, settings: list[str], folder: Path, **environment: str):
        self._host, self.folder, self._environment = host, folder, environment
        self.logs = folder.parent / "logs"
        self.logs.mkdir(exist_ok=True)
        self.options = [*settings[2:], "--set", f"output_prefix={folder}/tokens"]

    def finished(self) -> dict[Path, int]:
        """The shards that are finished, with what tells whether one was made again."""
        return {path: path.stat().st_ino for path in (self.folder / "tokens_tokenizing.partial").glob(SHARD)}

    def start(self, *command: str) -> subprocess.Popen[str]:
        return self._host.start(*command, *self.options, log=self.logs / "command.log", **self._environment)

    def run(self, *command: str) -> None:
        assert self.start(*command).wait(240) == 0, self.output()

    def output(self) -> str:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in self.logs.iterdir())

    def wait_for_shards(self, more_than: int = 3) -> dict[Path, int]:
        """Wait until more shards than these are finished, and give those."""
        wait_for(lambda: len(self.finished()) > more_than, self.logs)
        return self.finished()


class Cleaning:
    """Step 0, which waits for its jobs itself, on one host of a cluster or without one."""

    def __init__(self, text: list[str], folder: Path, executor: str, **options: object):
        self.folder, self.logs = folder / "clean", folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        settings = typed(input=f"[{', '.join(text)}]", output_dir=self.folder, report_only="false", repeated_lines=5)
        settings += typed(executor=executor, executor_options=json.dumps(options), evaluation_data="[]")
        self.command = (sys.executable, "0_clean_corpus.py", *settings)

    def start(self, host: Host, **environment: str) -> subprocess.Popen[str]:
        return host.start(*self.command, log=self.logs / "command.log", **environment)

    def output(self) -> str:
        paths = [*self.logs.iterdir(), *self.folder.glob("work*/*/*/slurm_logs/*")]
        return "\n".join(path.read_text(encoding="utf-8", errors="replace")[-3000:] for path in paths)

    def wait_for_tasks(self, number: int) -> None:
        wait_for(lambda: len([*self.folder.glob("work*/*/reading/completions/*")]) >= number, self.logs)

    def written(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in self.folder.rglob("*.zst")}


@pytest.fixture(scope="module")
def cleaned(text: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    one = Cleaning(text, tmp_path_factory.mktemp("cleaned"), "local")
    subprocess.run(one.command, cwd=ROOT, check=True, capture_output=True)
    assert len(one.written()) > 10
    return one.written()


@pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurmctld slurmd slurm-client")
@pytest.mark.skipif(USER_NAMESPACE, reason="Slurm's daemons change their groups, which root alone may")
class TestSlurm:
    @pytest.fixture
    def hosts(self, tmp_path: Path) -> Iterator[list[Host]]:
        """Two hosts with Slurm."""
        config = tmp_path / "slurm.conf"
        config.write_text(CONFIG.format(own=OWN), encoding="utf-8")
        with cluster(2) as hosts:
            for host in hosts:
                host.run("mkdir", "-p", f"{OWN}/state", f"{OWN}/spool")
            daemons = [hosts[0].start("slurmctld", "-D", "-f", str(config), log=tmp_path / "slurmctld.log")]
            time.sleep(2)
            for host in hosts:
                command = ("slurmd", "-D", "-f", str(config), "-N", host.name)
                daemons.append(host.start(*command, log=tmp_path / f"slurmd-{host.number}.log"))
            wait_for(lambda: self.ask(hosts, tmp_path, "sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"], tmp_path)
            yield hosts
            for daemon in daemons:
                daemon.terminate()

    def ask(self, hosts: list[Host], folder: Path, *command: str) -> str:
        time.sleep(0.5)
        return hosts[0].run("env", f"SLURM_CONF={folder}/slurm.conf", *command)

    def test_a_job_of_two_nodes_is_requeued(self, hosts: list[Host], data: dict[str, str], tmp_path: Path) -> None:
        """At the signal before the time limit the run saves, the job is requeued, and the run ends at last."""
        log, run = tmp_path / "job.log", tmp_path / "run"

        def text() -> str:
            return log.read_text(encoding="utf-8") if log.exists() else ""

        settings = {"train_tokens": 1500 * 8 * 32, "save_interval": 50, "max_epochs_per_source": 100}
        given = typed(output_model_dir=run, num_processes=1, **settings)
        options = ("--nodes=2", "--gpus-per-node=0", f"--output={log}", f"--chdir={ROOT}", "--export=ALL")
        batch = ("sbatch", "--parsable", *options, "cluster/3_train.sbatch", "--config", data["config"], *given)
        show = ("scontrol", "show", "job", job := self.ask(hosts, tmp_path, *batch).strip())
        wait_for(lambda: "step 60/" in text(), tmp_path)
        self.ask(hosts, tmp_path, "scancel", "--batch", "--signal=USR1", job)
        wait_for(lambda: "saved" in text() and "stopped by" in text(), tmp_path)
        wait_for(lambda: "Restarts=1" in self.ask(hosts, tmp_path, *show), tmp_path, 200)
        # Slurm lets a requeued job wait for two minutes; within the second of its end a node would refuse it.
        time.sleep(2)
        self.ask(hosts, tmp_path, "scontrol", "update", f"JobId={job}", "StartTime=now")
        wait_for(lambda: "trained " in text().split("resuming from")[-1], tmp_path, 240)
        assert "resuming from" in text()
        wait_for(lambda: "COMPLETED" in self.ask(hosts, tmp_path, *show), tmp_path)
        assert (run / "manifest.json").is_file()

    def test_a_lost_node_costs_its_unfinished_shards(
        self, hosts: list[Host], settings: list[str], expected: dict[str, bytes], tmp_path: Path
    ) -> None:
        parts = Tokenizing(hosts[0], settings, tmp_path / "out", SLURM_CONF=f"{tmp_path}/slurm.conf")
        sent = ("sbatch", "--array=0-5", f"--output={parts.logs}/%a.log", "cluster/2_tokenize.sbatch")
        queue = ("squeue", "-h", "-t", "RUNNING,PENDING")
        parts.run(*sent)
        finished = parts.wait_for_shards()
        hosts[1].crash()
        wait_for(lambda: not self.ask(hosts, tmp_path, *queue), parts.logs, 240)
        parts.run(*sent)  # what the lost node had not finished, if Slurm has not started it again
        wait_for(lambda: not self.ask(hosts, tmp_path, *queue), parts.logs, 240)
        assert finished.items() <= parts.finished().items(), "a finished shard was made again"
        parts.run("bash", "2_tokenize.sh", "--merge", "1/2")
        parts.run("bash", "2_tokenize.sh", "--merge")
        assert written(parts.folder) == expected

    def test_a_cleaning_survives_a_lost_node(
        self, hosts: list[Host], text: list[str], cleaned: dict[str, bytes], tmp_path: Path
    ) -> None:
        options = {"partition": "main", "mem_per_cpu_gb": 1, "tasks_per_job": 3, "time": "1:00:00"}
        cleaning = Cleaning(text, tmp_path / "out", "slurm", **options)
        first = cleaning.start(hosts[0], SLURM_CONF=f"{tmp_path}/slurm.conf")
        cleaning.wait_for_tasks(3)
        hosts[1].crash()
        if first.wait(600):  # tasks of the lost node have failed
            assert "the same command does the rest" in cleaning.output()
            assert cleaning.start(hosts[0], SLURM_CONF=f"{tmp_path}/slurm.conf").wait(600) == 0, cleaning.output()
        assert cleaning.written() == cleaned


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: requirements/ray.lock")
class TestRay:
    @pytest.fixture
    def hosts(self, tmp_path: Path) -> Iterator[list[Host]]:
        ray = str(Path(sys.executable).with_name("ray"))
        common = ("--num-cpus=1", "--block", "--disable-usage-stats", "--object-store-memory=80000000")
        with cluster(2) as hosts:
            head, other = hosts
            head.start(
                ray, "start", "--head", "--node-ip-address=10.77.0.1", "--port=6379", "--include-dashboard=false",
                f"--temp-dir={OWN}/ray", *common, log=tmp_path / "ray-0.log",
            )  # fmt: skip
            wait_for(lambda: "Ray runtime started" in (tmp_path / "ray-0.log").read_text(), tmp_path)
            other.start(
                ray, "start", "--address=10.77.0.1:6379", "--node-ip-address=10.77.0.2", *common,
                log=tmp_path / "ray-1.log",
            )  # fmt: skip
            wait_for(lambda: "Ray runtime started" in (tmp_path / "ray-1.log").read_text(), tmp_path)
            yield hosts

    def test_a_lost_node_and_a_killed_command(
        self, hosts: list[Host], settings: list[str], expected: dict[str, bytes], tmp_path: Path
    ) -> None:
        parts = Tokenizing(hosts[0], settings, tmp_path / "out", RAY_ADDRESS="10.77.0.1:6379")
        command = (sys.executable, "cluster/2_tokenize_ray.py", "6")
        killed = parts.start(*command)
        finished = parts.wait_for_shards()
        os.killpg(killed.pid, 9)
        again = parts.start(*command)
        finished = parts.wait_for_shards(len(finished))
        assert again.poll() is None, parts.output()
        hosts[1].crash()
        assert again.wait(900) == 0, parts.output()
        assert "were finished before" in parts.output()
        assert written(parts.folder) == expected

    def test_a_cleaning_that_is_killed_and_loses_a_node(
        self, hosts: list[Host], text: list[str], cleaned: dict[str, bytes], tmp_path: Path
    ) -> None:
        cleaning = Cleaning(text, tmp_path / "out", "ray", mem_per_cpu_gb=0.1)
        killed = cleaning.start(hosts[0], RAY_ADDRESS="10.77.0.1:6379")
        cleaning.wait_for_tasks(3)
        os.killpg(killed.pid, 9)
        again = cleaning.start(hosts[0], RAY_ADDRESS="10.77.0.1:6379")
        cleaning.wait_for_tasks(6)
        hosts[1].crash()
        if again.wait(900):
            assert "the same command does the rest" in cleaning.output()
            assert cleaning.start(hosts[0], RAY_ADDRESS="10.77.0.1:6379").wait(900) == 0, cleaning.output()
        assert cleaning.written() == cleaned
