"""Step 2 on real Slurm and on real Ray: the bytes of one machine, also where a machine is lost half-way."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster.hosts import OWN, Host, cluster
from cluster.slurm import NEEDED, slurm_cluster, wait_for
from tiny import ROOT
from zerokara.tokens.cluster.ray_tasks import INSTALL

from zerokara.corpus.packed import zstd_module

WORDS = [
    "the",
    "sea",
    "ice",
    "melts",
    "in",
    "spring",
    "and",
    "春",
    "の",
    "海",
    "終日",
    "のたり",
    "かな",
    "¡olé!",
    "don't",
    "stop",
]
SHARD = "[0-9]*-[0-9]*.json"


def _lines(megabytes: float, seed: int) -> bytes:
    random, lines, size = Random(seed), [], 0
    while size < megabytes * 1e6:
        lines.append(json.dumps({"text": " ".join(random.choices(WORDS, k=400))}, ensure_ascii=False).encode() + b"\n")
        size += len(lines[-1])
    return b"".join(lines) + b"{broken\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Entries in every format, some 50 MB: lines, two packings in blocks, many small files, row groups."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.jsonl").write_bytes(_lines(12, 1))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(_lines(12, 2), 1))
    (folder / "c.jsonl.zst").write_bytes(zstd_module().compress(_lines(12, 3)))
    (folder / "d").mkdir()
    for number in range(300):
        (folder / "d" / f"{number:03d}.txt").write_text(f"file {number}\nof text\n" * 300, encoding="utf-8")
    rows = [json.loads(line)["text"] for line in _lines(10, 4).splitlines()[:-1]]
    pq.write_table(pa.table({"text": rows}), folder / "e.parquet", row_group_size=500)
    return [str(folder / name) for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d", "e.parquet")]


@pytest.fixture(scope="module")
def settings(data: dict[str, str], text: list[str]) -> list[str]:
    """The command line that all have in common."""
    given = {"input_jsonl": f"[{', '.join(text)}]", "num_workers": "1"}
    options = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    return ["bash", "2_tokenize.sh", "--config", data["config"], *options]


@pytest.fixture(scope="module")
def expected(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one machine writes."""
    folder = tmp_path_factory.mktemp("one")
    subprocess.run([*settings, "--set", f"output_prefix={folder}/tokens"], cwd=ROOT, check=True, capture_output=True)
    return written(folder)


def written(folder: Path) -> dict[str, bytes]:
    """All files but the manifest, which has times in it."""
    return {path.name: path.read_bytes() for path in folder.glob("tokens*") if path.suffix != ".json"}


class Step:
    """Step 2 at work on the first host."""

    def __init__(self, host: Host, settings: list[str], folder: Path, engine: str, **environment: str):
        self._host, self.folder, self.log = host, folder, folder.parent / f"{folder.name}.log"
        options = ("--set", f"cluster={engine}", "--set", "cluster_parts=6", "--set", f"output_prefix={folder}/tokens")
        self._process = host.start(*settings, *options, log=self.log, **environment)

    @property
    def work_folder(self) -> Path:
        return self.folder / "tokens_tokenizing.partial"

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for_shards_of(self, host: str) -> None:
        """Wait until a part is at work on a host, and has finished something."""
        deadline = time.monotonic() + 120
        while True:
            logs = list(self.work_folder.glob("part-*.log"))
            if any(f"on {host}: 1 worker" in log.read_text(encoding="utf-8", errors="replace") for log in logs) and (
                len(list(self.work_folder.glob(SHARD))) > 3
            ):
                return
            assert self._process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def lose(self, host: Host) -> None:
        """Lose a host half-way, and end well; no shard that was finished is made again."""
        self.wait_for_shards_of(host.name)
        finished = {path: path.stat().st_ino for path in self.work_folder.glob(SHARD)}
        host.crash()
        while self._process.poll() is None:
            for path, number in finished.items():
                with suppress(FileNotFoundError):  # the step is at its end
                    assert path.stat().st_ino == number, f"{path.name} was made again"
            time.sleep(0.5)
        print(f"{len(finished)} shards were finished when {host.name} was lost\n{self.end()}")

    def end(self, seconds: float = 240) -> str:
        """What it printed, once it has ended well."""
        assert self._process.wait(seconds) == 0, self.said()
        return self.said()

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self._host.run("pkill", "-INT", "-f", "zerokara.steps tokenize")
        return self._process.wait(120)

    def kill(self) -> None:
        """kill -9."""
        os.killpg(self._process.pid, 9)
        self._process.wait()


class TestSlurm:
    """An array of jobs."""

    pytestmark = NEEDED

    @pytest.fixture
    def hosts(self, tmp_path: Path) -> Iterator[list[Host]]:
        with slurm_cluster(tmp_path) as hosts:
            yield hosts

    def test_a_lost_node_costs_its_unfinished_shards(
        self, hosts: list[Host], settings: list[str], expected: dict[str, bytes], tmp_path: Path
    ) -> None:
        step = Step(hosts[0], settings, tmp_path / "out", "slurm", SLURM_CONF=str(tmp_path / "slurm.conf"))
        step.lose(hosts[1])
        assert written(step.folder) == expected
        assert hosts[0].run("env", f"SLURM_CONF={tmp_path}/slurm.conf", "squeue", "-h") == ""

    @pytest.mark.parametrize("then", ["slurm", "none"])
    def test_a_killed_step_finds_its_array_at_work(
        self, hosts: list[Host], settings: list[str], expected: dict[str, bytes], tmp_path: Path, then: str
    ) -> None:
        """And waits for it; or ends it, where this machine alone goes on."""
        environment = {"SLURM_CONF": str(tmp_path / "slurm.conf")}
        step = Step(hosts[0], settings, tmp_path / "out", "slurm", **environment)
        step.wait_for_shards_of("host-1")
        step.kill()
        again = Step(hosts[0], settings, tmp_path / "out", then, **environment).end()
        assert ("of an earlier start are still at work" in again) == (then == "slurm")
        assert "were finished before" in again
        assert written(step.folder) == expected
        assert hosts[0].run("env", f"SLURM_CONF={tmp_path}/slurm.conf", "squeue", "-h") == ""

    def test_ctrl_c_ends_the_array(self, hosts: list[Host], settings: list[str], tmp_path: Path) -> None:
        step = Step(hosts[0], settings, tmp_path / "out", "slurm", SLURM_CONF=str(tmp_path / "slurm.conf"))
        step.wait_for_shards_of("host-1")
        assert step.interrupt() == 130
        assert hosts[0].run("env", f"SLURM_CONF={tmp_path}/slurm.conf", "squeue", "-h") == ""
        left = sorted(path.name for path in step.work_folder.iterdir())
        assert not [name for name in left if name.endswith(".partial") or name == "cluster.json"], left


def test_without_its_commands_slurm_is_named(settings: list[str], tmp_path: Path) -> None:
    for name in ("bash", "env", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    command = [*settings, "--set", "cluster=slurm", "--set", f"output_prefix={tmp_path}/out/tokens"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "cluster = slurm: sbatch, squeue, scancel not found here; run it on a machine of a Slurm" in done.stderr


@pytest.mark.skipif(find_spec("ray") is None, reason=f"Ray is not installed: {INSTALL}")
class TestRay:
    """Tasks of Ray."""

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

    def test_a_lost_node_costs_its_unfinished_shards(
        self, hosts: list[Host], settings: list[str], expected: dict[str, bytes], tmp_path: Path
    ) -> None:
        step = Step(hosts[0], settings, tmp_path / "out", "ray", RAY_ADDRESS="10.77.0.1:6379")
        step.lose(hosts[1])
        assert written(step.folder) == expected

    def test_a_killed_step_leaves_nothing_at_work_and_goes_on(
        self, hosts: list[Host], settings: list[str], expected: dict[str, bytes], tmp_path: Path
    ) -> None:
        step = Step(hosts[0], settings, tmp_path / "out", "ray", RAY_ADDRESS="10.77.0.1:6379")
        step.wait_for_shards_of("host-1")
        step.kill()
        deadline = time.monotonic() + 60
        while any("part_process" in host.run("ps", "ax", "-o", "args") for host in hosts):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        again = Step(hosts[0], settings, tmp_path / "out", "ray", RAY_ADDRESS="10.77.0.1:6379")
        assert "were finished before" in again.end()
        assert written(step.folder) == expected
