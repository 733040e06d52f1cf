"""Training processes that are forked from one that has torch loaded: starting Python again would take seconds each."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch

from zerokara.model import parallel
from zerokara.training import launching
from zerokara.training.processes.joining import init_process_group


def answers(num_processes: int, tensor_parallel_size: int, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Call `work` in each of so many processes, joined on a CPU; return what each answered, in no order."""
    read_from, write_to = os.pipe()
    with launching.rendezvous() as place:
        children = []
        for rank in range(num_processes):
            child = os.fork()
            if not child:
                os.close(read_from)
                _work(rank, num_processes, tensor_parallel_size, place, work, write_to)
            children.append(child)
        os.close(write_to)
        with os.fdopen(read_from, "rb") as lines:
            found = [json.loads(line) for line in lines]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), f"processes ended with {codes}"
    return found


def _work(
    rank: int,
    num_processes: int,
    tensor_parallel_size: int,
    place: dict[str, str],
    work: Callable[[], dict[str, Any]],
    write_to: int,
) -> None:
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
