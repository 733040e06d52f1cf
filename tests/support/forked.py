"""Work in training processes that are forked from one with everything loaded: starting Python again takes seconds.

``python -m forked MODULE FUNCTION FILE`` calls a function of a test module for each job of a JSON file (`answers_of`),
and prints what its processes answered as a JSON list.
"""

import gc
import importlib
import inspect
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import warm

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.training import spawning
from zerokara.training.processes.joining import init_process_group


def answers_of(
    work: Callable[..., dict[str, Any]], jobs: Mapping[str, dict[str, Any]], folder: Path, server: Path | None
) -> dict[str, list[dict[str, Any]]]:
    """Call `work(config, **more)`, a function of a test module, in the processes of each job, by name.

    A job is settings, the number of its ``processes``, and ``more``. The answers of its processes are in no order.
    """
    file = folder / "jobs.json"
    file.write_text(json.dumps(list(jobs.values())), encoding="utf-8")
    command = [warm.python_of(server), "-m", "forked", Path(inspect.getfile(work)).stem, work.__name__, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(jobs, json.loads(done.stdout.splitlines()[-1]), strict=True))


def config_from(settings: Mapping[str, Any]) -> PretrainConfig:
    return load(PretrainConfig, "/dev/null", [f"{key}={value}" for key, value in settings.items()])


def answers(num_processes: int, tensor_parallel_size: int, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Call `work` in each of `num_processes`, joined on a CPU; return what each answered, in no order."""
    read_from, write_to = os.pipe()
    with spawning.local_rendezvous() as place:
        children = []
        for rank in range(num_processes):
            child = os.fork()
            if not child:
                os.close(read_from)
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes}
                os.environ.update({key: str(value) for key, value in numbers.items()}, DS_ACCELERATOR="cpu", **place)
                try:
                    torch.set_num_threads(1)
                    init_process_group(torch.device("cpu"))
                    parallel.start(0, tensor_parallel_size)
                    os.write(write_to, (json.dumps(work()) + "\n").encode())
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        os.close(write_to)
        with os.fdopen(read_from, "rb") as lines:
            found = [json.loads(line) for line in lines]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), f"processes ended with {codes}"
    return found


def main(module: str, function: str, file: str) -> None:
    from zerokara.training.compute import zero  # noqa: F401  # DeepSpeed, once for all processes

    warnings.simplefilter("ignore")
    work = getattr(importlib.import_module(module), function)
    gc.collect()
    gc.freeze()  # a million objects of the libraries, which whoever looks for tensors would go through
    found = []
    for job in json.loads(Path(file).read_text(encoding="utf-8")):
        processes, more = job.pop("processes", 2), job.pop("more", {})
        config = config_from(job)
        found.append(answers(processes, config.tensor_parallel_size, partial(work, config, **more)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
