"""A training process: ``python -m zerokara.training.worker PLAN WORK``, as the launching process starts it.

It reads the plan from its file and does its work. If it runs out of memory or loses the others, it says why:

torch tells a GPU's lack of memory by a class of its own, and a CPU's only by the text of a RuntimeError; the same holds
for a lost connection between processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed

from zerokara import supervision
from zerokara.errors import RunError, guarded
from zerokara.training.evaluation import Validation, evaluate_checkpoint, of_loss
from zerokara.training.planning.memory import MemoryForecast
from zerokara.training.planning.run_plan import PRETRAINING, RunPlan, Task, read_plan
from zerokara.training.processes.joining import Processes
from zerokara.training.trainer import open_trainer
from zerokara.training.trial import run_trial

_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""Source: torch 2.13, c10/core/impl/alloc_cpu.cpp."""
_GLOO = ("gloo/transport", "gloo::", "Gloo")
"""Where gloo's errors say that they come from."""


class LostConnection(RunError):
    """A training process lost the others."""

    exit_code = supervision.LOST_CONNECTION


class OutOfMemory(RunError):
    """A training process needed more memory than there is."""

    exit_code = supervision.OUT_OF_MEMORY


def train(
    plan: RunPlan,
    validations: Callable[[RunPlan, Processes], list[Validation]] = of_loss,
    stop_after: int | None = None,
) -> None:
    """Train from the newest checkpoint to the end, or so far."""
    with open_trainer(plan, validations, stop_after) as trainer:
        trainer.train()


WORK: Mapping[str, Callable[..., None]] = {
    "train": train,
    "prove": lambda plan, last_step: train(plan, lambda *_: [], int(last_step)),
    "trial": lambda plan, result_path: run_trial(plan, Path(result_path)),
    "evaluate": lambda plan, folder: evaluate_checkpoint(plan, Path(folder)),
}
"""What a training process is asked for by name; each takes the plan and the arguments after the name."""


def main(arguments: Sequence[str], task: Task = PRETRAINING, work: Mapping[str, Callable[..., None]] = WORK) -> int:
    """Do what `arguments` name: the file of a plan of `task`, a key of `work`, its arguments. Return the exit code."""
    supervision.end_with_launcher()
    path, name, *others = arguments

    def run() -> None:
        plan = read_plan(Path(path), task)
        # torch's agents go on where one machine is lost.
        number = int(os.environ["WORLD_SIZE"])
        if number != plan.num_processes:
            plan = plan.on_processes(number, number // plan.processes_per_node)
        explained(work[name], plan, *others)

    return guarded(run, again="")


def explained(work: Callable[..., None], plan: RunPlan, *arguments: str) -> None:
    """Do `work`, and explain a lack of memory or a lost connection.

    Raises:
        OutOfMemory: with the state by part, and a setting that would fit.
        LostConnection: another process is gone, or did not answer in time.
    """
    forecast = plan.memory
    try:
        work(plan, *arguments)
    except (RuntimeError, MemoryError) as error:
        message, rank = str(error).strip() or type(error).__name__, os.environ.get("RANK", "0")
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in message:
            raise OutOfMemory(_out_of_memory_text(forecast, rank, message.splitlines()[0])) from error
        if isinstance(error, torch.distributed.DistError) or any(mark in message for mark in _GLOO):
            raise LostConnection(
                f"process {rank} lost the others, or waited too long for them: {message.splitlines()[0]}. If another "
                "process has failed, its message says why; if none has, see whether one was killed or the network is "
                "cut. The newest checkpoint is whole: the next start resumes from it"
            ) from error
        raise
    # NCCL asks for it. After a failure it could wait for the others: the process just ends.
    torch.distributed.destroy_process_group()


def _out_of_memory_text(forecast: MemoryForecast, rank: str, message: str) -> str:
    pools = "; ".join(f"{pool.name} {pool.text}" for pool in forecast.pools)
    return (
        f"out of memory in process {rank} of {forecast.num_processes}, at micro_batch_size "
        f"{forecast.config.micro_batch}. At its start: {pools}. {forecast.remedy()[1]}. No checkpoint was touched: "
        f"with such a setting the next start resumes. (The system's message: {message})"
    )


if __name__ == "__main__":
    supervision.leave(main(sys.argv[1:]))
