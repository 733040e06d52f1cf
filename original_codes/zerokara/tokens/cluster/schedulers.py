"""Which scheduler runs the parts: the one that `cluster` names."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Generator, Sequence

from zerokara.config.data import DataSettings
from zerokara.corpus.find import InputFile
from zerokara.corpus.read import total_plain_bytes
from zerokara.errors import UserError
from zerokara.tokens.cluster import coordinator, ray_tasks, slurm
from zerokara.tokens.cluster.parts import usual_number
from zerokara.tokens.cluster.scheduler import Scheduler
from zerokara.tokens.shards import ShardResult, Tally
from zerokara.tokens.workers import run_in_workers


def scheduler_of(config: DataSettings) -> Scheduler | None:
    """The scheduler that the settings name; None for this machine alone.

    Raises:
        UserError: it is missing here, or there is no cluster.
    """
    given = None if config.num_workers == "auto" else config.num_workers
    if config.cluster == "slurm":
        if lacking := slurm.missing():
            raise UserError(config.fault("cluster", f"{lacking} not found here", slurm.INSTALL))
        return slurm.SlurmArray(given)
    if config.cluster == "ray":
        if importlib.util.find_spec("ray") is None:
            raise UserError(config.fault("cluster", "Ray is not installed", ray_tasks.INSTALL))
        try:
            return ray_tasks.RayTasks(given)
        except ConnectionError as error:
            where = os.environ.get(ray_tasks.ADDRESS)
            rule = f"no Ray cluster answers at {where}" if where else "no Ray cluster runs on this machine"
            raise UserError(config.fault("cluster", rule, f"{ray_tasks.START}; or set {ray_tasks.ADDRESS}")) from error
    return None


def num_parts(config: DataSettings, files: Sequence[InputFile]) -> int:
    """Parts that the work is dealt into."""
    return usual_number(total_plain_bytes(files)) if config.cluster_parts == "auto" else config.cluster_parts


def run_tasks(
    config: DataSettings, files: Sequence[InputFile], scheduler: Scheduler | None
) -> Callable[..., Generator[Tally | ShardResult, None, None]]:
    """What does the tasks: worker processes of this machine, or the cluster."""
    if scheduler is None:
        return run_in_workers
    return coordinator.runner(scheduler, num_parts(config, files))
