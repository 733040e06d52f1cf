"""The stages one after another, each as tasks that datatrove's executors run: here, as jobs of Slurm, or on Ray.

A task that is complete has a mark in the folder of its stage, so the same command does what is left. Slurm's jobs run
on when this process ends; the same command waits for them first.
"""

import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from loguru import logger

from zerokara.base.durable import atomic_file, make_folders, sync_folder
from zerokara.base.errors import RunError
from zerokara.base.progress import Progress, bytes_text, log, plural
from zerokara.base.resources import available_cores, available_memory, end_with_step, ended, start_fork_server
from zerokara.cleaning import stages
from zerokara.cleaning.plan import CLEAN, Plan
from zerokara.corpus.read import has_unknown_size, total_plain_bytes

Stage = Callable[[Plan, Path, int, int], None]
_WORKER_BYTES = 2_000_000_000
_MEMORY_A_BYTE = 0.75
"""Bytes of memory that reading takes for each byte of text, of documents of 3.4 kB; of shorter ones more."""
_POLL_SECONDS, _PATIENCE_SECONDS = 2.0, 3600.0
MOVING = "moving"
"""Mark beside the work folder, from when outputs are replaced until the manifest is written."""


def num_workers(plan: Plan) -> int:
    most, wanted = min(available_cores(), max(1, available_memory() // _WORKER_BYTES)), plan.config.num_workers
    return min(most if wanted == "auto" else wanted, len(plan.tasks))


def memory_warning(plan: Plan) -> str:
    """Warn of the largest compressed file, which is a task that nothing can cut; empty if it is small."""
    packed = [file for file in plan.files if has_unknown_size(file, plan.config.txt_document)]
    largest = max(packed, key=attrgetter("bytes"), default=None)
    needed = _MEMORY_A_BYTE * total_plain_bytes([largest], plan.config.text_field) if largest else 0
    if largest is None or needed < _WORKER_BYTES:
        return ""
    unpack = "zstdcat" if largest.compression == "zstd" else "zcat"
    cut = f"{unpack} {largest.name} | split -l 500000 --filter='gzip > $FILE.{largest.format}.gz'"
    return f"warning: {largest.name} is one task, of about {bytes_text(needed)} of memory; cut it, e.g. with: {cut}"


def run(folder: Path, plan: Plan) -> None:
    """Do all that is left of the work in `folder`.

    Raises:
        RunError: a process died, or a task failed on the cluster.
        OSError: as a task met it (a full disk, a file that is gone).
    """
    logger.disable("datatrove")  # its lines are in the folders of the stages
    folder = folder.absolute()
    _run("reading", stages.read, folder, plan, len(plan.tasks))
    _run("comparing", stages.pairs, folder, plan, len(plan.tasks))
    _run("choosing", stages.choose, folder, plan, 1)
    _run("counting lines", stages.count_lines, folder, plan, len(plan.tasks))
    _run("writing", stages.write, folder, plan, len(plan.tasks))


def _do(stage: Stage, current: str, plan: Plan, folder: Path, _: object, rank: int, num_tasks: int) -> None:
    """Do a task in the folder that the paths of the configuration are relative to."""
    os.chdir(current)
    stage(plan, folder, rank, num_tasks)


def _run(name: str, stage: Stage, folder: Path, plan: Plan, num_tasks: int) -> None:
    marks, job, options = folder / name.replace(" ", "-"), f"zerokara-{folder.name}", plan.config.executor_options
    common: dict[str, Any] = {
        "pipeline": [partial(_do, stage, os.getcwd(), plan, folder)],
        "tasks": num_tasks,
        "logging_dir": str(marks),
    }
    if plan.config.executor == "slurm":
        log(f"{name}: {plural(num_tasks, 'task')} as jobs of Slurm ({job})")
        _wait_for_slurm(job)
        environment = {"env_command": f'export PATH="{sys.prefix}/bin:$PATH"', "job_name": job, "qos": None}
        _made(_Slurm, {"time": "24:00:00", "mem_per_cpu_gb": 4} | environment | options | common).run()
        _wait_for_slurm(job)
    elif plan.config.executor == "ray":
        import ray

        ray.init(address="auto", ignore_reinit_error=True, log_to_driver=False)
        _made(RayPipelineExecutor, options | common).run()
    else:
        _run_here(LocalPipelineExecutor(**common, workers=num_workers(plan)), name)
    if missing := len(LocalPipelineExecutor(**common).get_incomplete_ranks()):
        kept = f"what is done is kept, and the same command does the rest; the logs are in {marks}"
        raise RunError(f"{name}: {missing} of {num_tasks} tasks failed; {kept}")


class _Slurm(SlurmPipelineExecutor):
    def launch_merge_stats(self) -> None:
        """Submit no merge job: it would wait for ever if a task has failed, and the stages count by themselves."""


def _made(kind: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        return kind(**options)
    except TypeError as error:
        raise RunError(f"executor_options: {error}") from None


def _run_here(executor: LocalPipelineExecutor, label: str) -> None:
    """Run tasks in processes of this machine; datatrove's own pool would wait for ever for one that was killed."""
    ranks = executor.get_incomplete_ranks()
    context = start_fork_server([__name__])  # what it imports is there for all workers of all stages
    pool = ProcessPoolExecutor(min(executor.workers, len(ranks) or 1), context, _begin)
    try:
        with ended(pool), Progress(label, executor.tasks, " tasks", done=executor.tasks - len(ranks)) as progress:
            left = {pool.submit(executor._run_for_rank, rank) for rank in ranks}
            while left:
                done, left = wait(left, timeout=1, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                progress.advance(len(done))
    except BrokenProcessPool:
        remedy = "most often the machine ran out of memory: run again with fewer processes (--set num_workers=1), and "
        remedy += "cut compressed files of more than a gigabyte"
        raise RunError(f"a process died; what is done is kept, and the same command resumes; {remedy}") from None


def _begin() -> None:
    end_with_step()
    logger.disable("datatrove")


def _wait_for_slurm(job: str) -> None:
    """Wait until no job of this name is left; Slurm may be out of reach for an hour, as when its controller restarts.

    Raises:
        RunError: it is out of reach for longer.
    """
    answered, told = time.monotonic(), ""
    while True:
        asked = subprocess.run(["squeue", "-h", "-n", job], capture_output=True, encoding="utf-8", check=False)
        if not asked.returncode:
            if not asked.stdout.strip():
                return
            answered = time.monotonic()
        elif time.monotonic() - answered > _PATIENCE_SECONDS:
            raise RunError(f"squeue fails: {asked.stderr.strip()}; the same command waits for its jobs")
        elif asked.stderr != told:
            told = asked.stderr
            log(f"warning: squeue failed, and is asked again: {told.strip()}")
        time.sleep(_POLL_SECONDS)


def move_into_place(folder: Path, plan: Plan) -> None:
    """Give the clean text of each task its name, and put what each rule dropped into one file."""
    (folder.parent / MOVING).touch()
    shutil.rmtree(folder / "writing")  # which is done again if this is interrupted
    for output in plan.outputs:
        output.unlink(missing_ok=True)  # of an earlier run
        make_folders(output.parent)
    output, dropped = Path(plan.config.output_dir), defaultdict[str, list[Path]](list)
    for part in sorted(folder.glob("*.jsonl.zst")):
        name, _, number = part.name.partition("-")
        if name == CLEAN:
            os.replace(part, output / "text" / number)
        else:
            dropped[name].append(part)
    sync_folder(output / "text")
    for name, parts in dropped.items():
        with atomic_file(output / "dropped" / f"{name}.jsonl.zst") as file:
            for part in parts:
                with open(part, "rb") as records:
                    shutil.copyfileobj(records, file)
