"""A process that runs out of memory, or loses the others, says so in words and numbers.

torch tells a GPU's lack of memory by a class of its own, and a CPU's only by the text of a RuntimeError; the same holds
for a lost connection between processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed

from zerokara.errors import RunError
from zerokara.training.planning import memory_budget
from zerokara.training.planning.memory_budget import Budget
from zerokara.training.planning.run_plan import RunPlan as Preparation
from zerokara.training.processes import launcher

_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""Source: torch 2.13, c10/core/impl/alloc_cpu.cpp."""
_GLOO = ("gloo/transport", "gloo::", "Gloo")
"""Where gloo's errors say that they come from."""


class OutOfMemory(RunError):
    """A training process needed more memory than there is."""

    exit_code = launcher.OUT_OF_MEMORY


def room(device: torch.device, num_processes: int) -> Budget:
    """What there is for this process, which has loaded its libraries and holds no model."""
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return memory_budget.budget(num_processes, gpu_bytes)


@contextmanager
def explained(preparation: Preparation, device: torch.device) -> Iterator[None]:
    """Turn a lack of memory, or a lost connection, into words.

    Raises:
        OutOfMemory: with the estimate by part, and the settings that would fit.
        RunError: another process is gone, or did not answer in time.
    """
    there = room(device, preparation.num_processes)
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(_words(preparation, there, error)) from error
    except RuntimeError as error:
        if _CPU_ALLOCATOR in str(error):
            raise OutOfMemory(_words(preparation, there, error)) from error
        if isinstance(error, torch.distributed.DistError) or any(mark in str(error) for mark in _GLOO):
            raise RunError(_words_of_lost_connection(error)) from error
        raise


def _words(preparation: Preparation, there: Budget, error: BaseException) -> str:
    question = preparation.memory_question(there)
    needed = question.needed()
    rows = "; ".join(f"{name} {value}" for name, value in memory_budget.table(needed, there))
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"out of memory in process {_rank()} of {preparation.num_processes}, at micro_batch_size "
        f"{preparation.config.micro_batch}. The estimate: {rows}. {memory_budget.advice(question)}. No "
        f"checkpoint is touched: with one of these the next start resumes. (The system's words: {said})"
    )


def _words_of_lost_connection(error: BaseException) -> str:
    said = str(error).strip().splitlines()[0]
    return (
        f"process {_rank()} lost the others, or waited too long for them: {said}. If another process has failed, its "
        "words say why; if none has, see whether one was killed or the network is cut. The newest checkpoint is "
        "whole: the next start resumes from it"
    )


def _rank() -> str:
    return os.environ.get("RANK", "0")
