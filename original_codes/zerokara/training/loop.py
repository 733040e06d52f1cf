"""One training step: batch → loss → backward → guard → clip → update → record.

`train_step` is the only place where a step is made: training, the trial of a dry run and the proof of resume call it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zerokara.model import parallel
from zerokara.training.compute.engine import Engine
from zerokara.training.guards import StepGuard
from zerokara.training.processes.joining import Processes
from zerokara.training.run import StepBatches


@dataclass(frozen=True)
class StepRecord:
    """One step: an update of the weights, or one that was skipped."""

    step: int
    loss: float
    """Nats per token, the mean over the global batch."""
    learning_rate: float
    grad_norm: float
    """Before clipping; nan where the step was skipped for its loss."""
    seconds: float
    skip_reason: str = ""
    """Why the step was skipped; empty where it was not."""
    stop_requested: bool = False
    """Whether any process was asked to stop; all processes know alike, and leave after the same step."""


def train_step(
    engine: Engine,
    processes: Processes,
    take: Callable[[int], StepBatches],
    step: int,
    learning_rate: float,
    guard: StepGuard,
    stop: Callable[[], bool],
) -> StepRecord:
    """Train one step; every process must call it. `stop` says whether this process was asked to stop."""
    started = time.perf_counter()
    batches, device = take(step), processes.device
    # Tensor-parallel ranks compute the same sequences: one of them counts.
    counts = float(parallel.tensor_rank() == 0)
    (global_tokens,) = processes.sum([counts * batches.num_tokens])
    global_sequences = sum(len(one[0]) for one in batches.micro_batches) * parallel.data_size()
    nats = torch.zeros((), device=device)  # not read here: the host goes on while the device works
    for micro_batch in batches.micro_batches:
        on_device = [tensor.to(device, non_blocking=True) for tensor in micro_batch]  # pinned: nothing waits
        nats += engine.accumulate(on_device, global_tokens, global_sequences)
    requests = torch.full_like(nats, float(stop()), dtype=torch.float64)
    numbers = processes.sum_on_device(torch.stack([counts * nats.double(), requests]))
    read: list[float] = []
    skip_reason = ""

    def accept(values: list[float]) -> bool:
        nonlocal skip_reason
        read.extend(values)
        skip_reason = guard.skip_reason_of_loss(values[0] / global_tokens)
        return not skip_reason

    grad_norm = engine.update(learning_rate, numbers, accept)
    loss, stop_requested = read[0] / global_tokens, read[1] > 0
    if skip_reason:
        grad_norm = math.nan
    elif not math.isfinite(grad_norm):
        skip_reason = "the gradient is not finite"
    guard.note(loss, skip_reason)
    seconds = time.perf_counter() - started
    return StepRecord(step, loss, learning_rate, grad_norm, seconds, skip_reason, stop_requested)
