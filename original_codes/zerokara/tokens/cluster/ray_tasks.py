"""Parts as tasks of Ray. The only module that imports it; it needs the packages of requirements-ray.lock.

A task of Ray starts the process of its part and waits for it. Ray chooses the machine, and ends the tasks of a step
that has died. A lost machine is another matter: Ray 2.60 knows within half a minute that it is dead, and yet waits for
seven minutes for the answers of its tasks, or forever for a place that it had promised
(https://github.com/ray-project/ray/issues/63405). So each task says where it runs, and those of a dead machine are
given up here, and those without a place.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerokara.progress import log
from zerokara.tokens.cluster.part_process import ENDS_WITH_PARENT
from zerokara.tokens.cluster.parts import part_path

INSTALL = ".venv/bin/pip install --require-hashes --no-deps -r requirements-ray.lock"
ADDRESS = "RAY_ADDRESS"
START = ".venv/bin/ray start --head, and on each other machine .venv/bin/ray start --address=HOST:6379"
_SOURCE = Path(__file__).resolve().parents[3]
_END_SECONDS = 60.0


class RayTasks:
    """Ray, as `scheduler.Scheduler`."""

    name = "ray"

    def __init__(self, num_workers: int | None = None) -> None:
        """Connect to the cluster that RAY_ADDRESS names, or to the one that this machine is part of.

        A part gets `num_workers` cores, by default as many as the smallest machine has.

        Raises:
            ConnectionError: there is no cluster.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._ray: Any = ray
        ray.init(address=os.environ.get(ADDRESS, "auto"), log_to_driver=False, logging_level="ERROR")
        self._dead = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
        cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        self.num_workers: int | None = num_workers or max(1, min((count for count in cores if count), default=1))
        self._running: dict[int, Any] = {}
        self._told: set[str] = set()

    def start(self, folder: Path, numbers: Sequence[int]) -> None:
        """Give Ray one task for each part."""

        def run(command: list[str], environment: dict[str, str], folder: str, part: str) -> int:
            import ray

            with open(f"{part}.node", "w", encoding="utf-8") as file:
                file.write(ray.get_runtime_context().get_node_id())
            with open(f"{part}.log", "ab") as output:
                return subprocess.run(
                    command, cwd=folder, env={**os.environ, **environment}, stdout=output, stderr=output, check=False
                ).returncode

        task = self._ray.remote(num_cpus=self.num_workers, max_retries=0, scheduling_strategy="SPREAD")(run)
        place = folder.resolve()
        environment = {"PYTHONPATH": str(_SOURCE), "PYTHONSAFEPATH": "1", ENDS_WITH_PARENT: "1"}
        for number in numbers:
            node = part_path(place, number, "node")
            node.unlink(missing_ok=True)
            command = [sys.executable, "-m", "zerokara.tokens.cluster.part_process", str(place), str(number)]
            self._running[number] = task.remote(command, environment, str(Path.cwd()), str(node.with_suffix("")))

    def at_work(self, folder: Path) -> set[int]:
        """Ask Ray which tasks have ended, and which machines are dead."""
        if not self._running:
            return set()
        references = {reference: number for number, reference in self._running.items()}
        ended, _ = self._ray.wait(list(references), num_returns=len(references), timeout=0)
        for reference in ended:
            number = references[reference]
            try:
                self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                self._tell(f"part {number}: {str(error).strip().splitlines()[0]}")
            del self._running[number]
        dead = {node["NodeID"]: node["NodeManagerHostname"] for node in self._ray.nodes() if not node["Alive"]}
        if new := dead.keys() - self._dead:
            self._dead |= new
            self._tell(f"lost {', '.join(sorted(dead[node] for node in new))}")
            for number in list(self._running):
                if _node_of(folder, number) in {"", *dead}:
                    self._ray.cancel(self._running.pop(number), force=True)
        return set(self._running)

    def end(self, folder: Path) -> None:
        """Cancel what runs, and wait for it."""
        references = list(self._running.values())
        for reference in references:
            self._ray.cancel(reference, force=True)
        if references:
            self._ray.wait(references, num_returns=len(references), timeout=_END_SECONDS)
        self._running.clear()

    def _tell(self, text: str) -> None:
        if text not in self._told:
            log(f"  ray: {text}")
        self._told.add(text)


def _node_of(folder: Path, number: int) -> str:
    """The machine that a part runs on, by Ray's name; empty where it waits for one."""
    with suppress(FileNotFoundError):
        return part_path(folder, number, "node").read_text(encoding="utf-8")
    return ""
