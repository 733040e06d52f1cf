"""Parts as tasks of Ray. The only module that imports it; it needs the packages of requirements-ray.lock.

A task of Ray starts the process of its part and waits for it. Ray itself starts a task again whose machine is lost, and
ends those of a step that has died.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerokara.errors import Fault, UserError
from zerokara.progress import log
from zerokara.tokens.cluster.part_process import ENDS_WITH_PARENT
from zerokara.tokens.cluster.parts import part_path

INSTALL = ".venv/bin/pip install --require-hashes --no-deps -r requirements-ray.lock"
ADDRESS = "RAY_ADDRESS"
_SOURCE = Path(__file__).resolve().parents[3]
_RETRIES = 3
_END_SECONDS = 60.0


class RayTasks:
    """Ray, as `scheduler.Scheduler`."""

    name = "ray"

    def __init__(self, num_workers: int | None = None) -> None:
        """Connect to the cluster that RAY_ADDRESS names, or to the one that this machine is part of.

        A part gets `num_workers` cores, by default as many as the smallest machine has.

        Raises:
            UserError: Ray is missing, or there is no cluster.
        """
        if importlib.util.find_spec("ray") is None:
            raise UserError(Fault(where="cluster", value="ray", rule="Ray is not installed", remedy=INSTALL))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._ray: Any = ray
        address = os.environ.get(ADDRESS, "auto")
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=True)
        except ConnectionError as error:
            rule = f"there is no Ray cluster at {ADDRESS}={address}" if ADDRESS in os.environ else "no Ray runs here"
            remedy = (
                ".venv/bin/ray start --head, and on each other machine .venv/bin/ray start --address=HOST:6379; or set "
                f"{ADDRESS}"
            )
            raise UserError(Fault(where="cluster", value="ray", rule=rule, remedy=remedy)) from error
        cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        self.num_workers: int | None = num_workers or max(1, min((count for count in cores if count), default=1))
        self._running: dict[int, Any] = {}
        self._told: set[str] = set()

    def start(self, folder: Path, numbers: Sequence[int]) -> None:
        """Give Ray one task for each part."""

        def run(command: list[str], environment: dict[str, str], folder: str, log_path: str) -> int:
            with open(log_path, "ab") as output:
                return subprocess.run(
                    command, cwd=folder, env={**os.environ, **environment}, stdout=output, stderr=output, check=False
                ).returncode

        task = self._ray.remote(num_cpus=self.num_workers, max_retries=_RETRIES, scheduling_strategy="SPREAD")(run)
        place = folder.resolve()
        environment = {"PYTHONPATH": str(_SOURCE), "PYTHONSAFEPATH": "1", ENDS_WITH_PARENT: "1"}
        for number in numbers:
            command = [sys.executable, "-m", "zerokara.tokens.cluster.part_process", str(place), str(number)]
            self._running[number] = task.remote(
                command, environment, str(Path.cwd()), str(part_path(place, number, "log"))
            )

    def at_work(self, folder: Path) -> set[int]:
        """Ask Ray."""
        if self._running:
            references = {reference: number for number, reference in self._running.items()}
            ended, _ = self._ray.wait(list(references), num_returns=len(references), timeout=0)
            for reference in ended:
                number = references[reference]
                try:
                    self._ray.get(reference)
                except self._ray.exceptions.RayError as error:
                    text = str(error).strip().splitlines()[0]
                    if text not in self._told:
                        log(f"  ray: part {number}: {text}")
                    self._told.add(text)
                del self._running[number]
        return set(self._running)

    def end(self, folder: Path) -> None:
        """Cancel what runs, and wait for it."""
        references = list(self._running.values())
        for reference in references:
            self._ray.cancel(reference, force=True)
        if references:
            self._ray.wait(references, num_returns=len(references), timeout=_END_SECONDS)
        self._running.clear()
