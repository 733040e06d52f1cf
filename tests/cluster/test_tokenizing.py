"""Step 2 on real Slurm and on real Ray: the bytes of one machine, also where a machine is lost half-way."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster.hosts import OWN, Host, cluster
from cluster.slurm import NEEDED, ask, slurm_cluster, wait_for
from tiny import ROOT

WORDS = "the sea ice melts in spring and 春 の 海 終日 のたり かな ¡olé! don't stop"
SHARD = "[0-9]*-[0-9]*.json"


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
    given = {"input_jsonl": f"[{', '.join(text)}]", "num_workers": "1"}
    options = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    return ["bash", "2_tokenize.sh", "--config", data["config"], *options]


@pytest.fixture(scope="module")
def expected(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("one")
    subprocess.run([*settings, "--set", f"output_prefix={folder}/tokens"], cwd=ROOT, check=True, capture_output=True)
    return written(folder)


def written(folder: Path) -> dict[str, bytes]:
    """All files but the manifest, which has times in it."""
    return {path.name: path.read_bytes() for path in folder.glob("tokens*") if path.suffix != ".json"}


class Parts:
    def __init__(self, host: Host, settings: list[str], folder: Path, **environment: str):
        self._host, self.folder, self._environment = host, folder, environment
        self.logs = folder.parent / "logs"
        self.logs.mkdir(exist_ok=True)
        self.options = [*settings[2:], "--set", f"output_prefix={folder}/tokens"]

    def finished(self) -> dict[Path, int]:
        """The shards that are finished, with what tells whether one was made again."""
        return {path: path.stat().st_ino for path in (self.folder / "tokens_tokenizing.partial").glob(SHARD)}

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        return self._host.start(*command, *self.options, log=self.logs / "command.log", **self._environment)

    def do(self, *command: str) -> str:
        assert self.start(*command).wait(240) == 0, self.said()
        return self.said()

    def said(self) -> str:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in self.logs.iterdir())

    def wait_for_shards(self, more_than: int = 3) -> dict[Path, int]:
        """Wait until more shards than these are finished, and give those."""
        deadline = time.monotonic() + 120
        while len(finished := self.finished()) <= more_than:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)
        return finished

    def check_kept(self, finished: dict[Path, int]) -> None:
        now = self.finished()
        assert all(now[path] == number for path, number in finished.items())


class TestSlurm:
    pytestmark = NEEDED

    def test_a_lost_node_costs_its_unfinished_shards(
        self, settings: list[str], expected: dict[str, bytes], tmp_path: Path
    ) -> None:
        config = tmp_path / "slurm.conf"
        with slurm_cluster(tmp_path) as hosts:
            parts = Parts(hosts[0], settings, tmp_path / "out", SLURM_CONF=str(config))
            sent = ("sbatch", "--array=0-5", f"--output={parts.logs}/%a.log", "2_tokenize.sbatch")
            parts.do(*sent)
            finished = parts.wait_for_shards()
            hosts[1].crash()
            wait_for(lambda: not ask(hosts[0], config, "squeue", "-h", "-t", "RUNNING,PENDING"), parts.logs, 240)
            parts.do(*sent)  # what the lost node had not finished, if Slurm has not started it again
            wait_for(lambda: not ask(hosts[0], config, "squeue", "-h", "-t", "RUNNING,PENDING"), parts.logs, 240)
            parts.check_kept(finished)
            parts.do("bash", "2_tokenize.sh", "--merge", "1/2")
            parts.do("bash", "2_tokenize.sh", "--merge")
            assert written(parts.folder) == expected


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: requirements-ray.lock")
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
        parts = Parts(hosts[0], settings, tmp_path / "out", RAY_ADDRESS="10.77.0.1:6379")
        command = (sys.executable, "2_tokenize_ray.py", "6")
        killed = parts.start(*command)
        finished = parts.wait_for_shards()
        os.killpg(killed.pid, 9)
        again = parts.start(*command)
        finished = parts.wait_for_shards(len(finished))
        assert again.poll() is None, parts.said()
        hosts[1].crash()
        assert again.wait(900) == 0, parts.said()
        assert "were finished before" in parts.said()
        assert written(parts.folder) == expected
