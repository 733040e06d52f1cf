"""A training process: ``python -m zerokara.training.worker PLAN WORK``, as the launching process starts it.

It reads the plan from its file and does its work. If it runs out of memory or loses the others, it says why.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed

from zerokara.errors import RunError, guarded
from zerokara.resources import end_with_parent
from zerokara.training.loop import Trainer
from zerokara.training.planning.memory import MemoryForecast
from zerokara.training.planning.processors import PARENT_NAME
from zerokara.training.planning.run_plan import PRETRAINING, Task, read_plan
from zerokara.training.processes import supervision
from zerokara.training.trial import run_trial
from zerokara.training.validation import evaluate_checkpoint

_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""Source: torch 2.13, c10/core/impl/alloc_cpu.cpp. torch tells a CPU's lack of memory by the text of a RuntimeError."""
_GLOO = ("gloo/transport", "gloo::", "Gloo")
"""Where gloo's errors say that they come from; the same holds for a lost connection."""

WORK: Mapping[str, Callable[..., None]] = {
    "train": lambda plan: Trainer(plan).train(),
    "prove": lambda plan, last_step: Trainer(plan, lambda *_: [], int(last_step)).train(),
    "trial": lambda plan, result_path: run_trial(plan, Path(result_path)),
    "evaluate": lambda plan, folder: evaluate_checkpoint(plan, Path(folder)),
}
"""What a training process is asked for by name; each takes the plan and the arguments after the name."""


def main(arguments: Sequence[str], task: Task = PRETRAINING, work: Mapping[str, Callable[..., None]] = WORK) -> int:
    """Do what `arguments` name: the file of a plan of `task`, a key of `work`, its arguments. Return the exit code."""
    if launcher := os.environ.get(PARENT_NAME):  # should it die, this process saves
        end_with_parent(int(launcher), signal.SIGTERM)
    path, name, *others = arguments

    def run() -> None:
        plan = read_plan(Path(path), task)
        # torch's agents go on where one machine is lost.
        number = int(os.environ["WORLD_SIZE"])
        if number != plan.num_processes:
            plan = plan.on_processes(number, number // plan.processes_per_node)
        forecast = plan.memory
        try:
            work[name](plan, *others)
        except (RuntimeError, MemoryError) as error:
            code, text = _explained(error, forecast)
            if not code:
                raise
            explained = RunError(text)
            explained.exit_code = code
            raise explained from error
        # NCCL asks for it. After a failure it could wait for the others: the process just ends.
        torch.distributed.destroy_process_group()

    return guarded(run, again="")


def _explained(error: RuntimeError | MemoryError, forecast: MemoryForecast) -> tuple[int, str]:
    """Exit code and words for a lack of memory, with a setting that would fit, or a lost connection; 0 for another."""
    message, rank = str(error).strip() or type(error).__name__, os.environ.get("RANK", "0")
    reason = message.splitlines()[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in message:
        pools = "; ".join(f"{pool.name} {pool.text}" for pool in forecast.pools)
        return supervision.OUT_OF_MEMORY, (
            f"out of memory in process {rank} of {forecast.num_processes}, at micro_batch_size "
            f"{forecast.config.micro_batch}. At its start: {pools}. {forecast.remedy()[1]}. No checkpoint was touched: "
            f"with such a setting the next start resumes. (The system's message: {reason})"
        )
    if isinstance(error, torch.distributed.DistError) or any(mark in message for mark in _GLOO):
        return supervision.LOST_CONNECTION, (
            f"process {rank} lost the others, or waited too long for them: {reason}. If another process has failed, "
            "its message says why; if none has, see whether one was killed or the network is cut. The newest "
            "checkpoint is whole: the next start resumes from it"
        )
    return 0, ""


if __name__ == "__main__":
    supervision.leave(main(sys.argv[1:]))
