"""A training process: ``python -m zerokara.training.worker PLAN WORK``, as the launching process starts it.

It reads the plan from its file and does its work. If it runs out of memory or loses the others, it says why:

torch tells a GPU's lack of memory by a class of its own, and a CPU's only by the text of a RuntimeError; the same holds
for a lost connection between processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed

from zerokara.errors import RunError, guarded
from zerokara.training import task_test
from zerokara.training.evaluation import evaluate_checkpoint
from zerokara.training.planning.memory_forecast import MachineMemory, MemoryForecast
from zerokara.training.planning.run_plan import RunPlan, on_processes, read_plan
from zerokara.training.processes import joining, launcher, leaving
from zerokara.training.trainer import open_trainer
from zerokara.training.trial import run_trial

_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""Source: torch 2.13, c10/core/impl/alloc_cpu.cpp."""
_GLOO = ("gloo/transport", "gloo::", "Gloo")
"""Where gloo's errors say that they come from."""


class LostConnection(RunError):
    """A training process lost the others."""

    exit_code = launcher.LOST_CONNECTION


class OutOfMemory(RunError):
    """A training process needed more memory than there is."""

    exit_code = launcher.OUT_OF_MEMORY


def main(arguments: Sequence[str]) -> int:
    """Do the work that `arguments` name: the file of a plan, and what `work` takes. Return the exit code."""
    launcher.end_with_agent()
    path, *what = arguments
    return guarded(lambda: work(_plan_of(Path(path)), *what), again="")


def _plan_of(path: Path) -> RunPlan:
    """The plan for the machines that are left: torch's agents go on where one is lost."""
    plan = read_plan(path)
    nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    return plan if nodes == plan.nodes else on_processes(plan, nodes * plan.processes_per_node, nodes)


def work(plan: RunPlan, what: str, argument: str = "") -> None:
    """``train``; ``prove LAST_STEP`` trains so far, without validation; ``trial RESULT_FILE`` only tries a few steps;
    ``evaluate CHECKPOINT`` and ``test CHECKPOINT`` read the validation and the test data with it.
    """
    with _explained(plan, joining.local_device()):
        if what == "trial":
            run_trial(plan, Path(argument))
        elif what == "evaluate":
            evaluate_checkpoint(plan, Path(argument))
        elif what == "test":
            task_test.test(plan, Path(argument))
        else:
            proves = what == "prove"
            with open_trainer(plan, int(argument) if proves else None, validates=not proves) as trainer:
                trainer.train()
    # NCCL asks for it. After a failure it could wait for the others: the process just ends.
    torch.distributed.destroy_process_group()


@contextmanager
def _explained(plan: RunPlan, device: torch.device) -> Iterator[None]:
    """Explain a lack of memory, or a lost connection.

    Raises:
        OutOfMemory: with the state by part, and the settings that would fit.
        LostConnection: another process is gone, or did not answer in time.
    """
    forecast = plan.memory_forecast(MachineMemory.available(plan.processes_per_node, joining.gpu_memory(device)))
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(_out_of_memory_text(forecast, error)) from error
    except RuntimeError as error:
        if _CPU_ALLOCATOR in str(error):
            raise OutOfMemory(_out_of_memory_text(forecast, error)) from error
        if isinstance(error, torch.distributed.DistError) or any(mark in str(error) for mark in _GLOO):
            raise LostConnection(_lost_connection_text(error)) from error
        raise


def _out_of_memory_text(forecast: MemoryForecast, error: BaseException) -> str:
    layout, pools = forecast.layout, "; ".join(f"{pool.name} {pool.text}" for pool in forecast.pools)
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"out of memory in process {_rank()} of {layout.num_processes}, at micro_batch_size {layout.micro_batch_size}. "
        f"At its start: {pools}. {forecast.advice()}. No checkpoint was touched: with one of these settings the next "
        f"start resumes. (The system's message: {message})"
    )


def _lost_connection_text(error: BaseException) -> str:
    message = str(error).strip().splitlines()[0]
    return (
        f"process {_rank()} lost the others, or waited too long for them: {message}. If another process has failed, "
        "its message says why; if none has, see whether one was killed or the network is cut. The newest checkpoint is "
        "whole: the next start resumes from it"
    )


def _rank() -> str:
    return os.environ.get("RANK", "0")


if __name__ == "__main__":
    leaving.leave(main(sys.argv[1:]))
