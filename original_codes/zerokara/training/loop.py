"""The training loop: batch → loss → backward → judge → clip → update → record. A step's edge is handed in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed

from zerokara.model import parallel
from zerokara.samples.batches import Batches
from zerokara.samples.objective import Batch
from zerokara.training.guards import StepGuard
from zerokara.training.planning.schedule import Schedule
from zerokara.training.processes.stopping import StopRequest

if TYPE_CHECKING:
    from zerokara.training.compute.engine import Engine


@dataclass(frozen=True)
class StepRecord:
    """One step: an update of the weights, or one that was left out."""

    step: int
    loss: float
    """Nats a token, the mean over the global batch."""
    learning_rate: float
    grad_norm: float
    """Before clipping; nan where the step was skipped for its loss."""
    seconds: float
    skip_reason: str = ""
    """Why the step was skipped; empty where it was not."""


def train(
    engine: Engine,
    batches: Batches,
    schedule: Schedule,
    first_step: int,
    position: Callable[[int], int],
    device: torch.device,
    guard: StepGuard,
    stop: StopRequest,
    at_edge: Callable[[StepRecord, bool], bool],
) -> bool:
    """Train steps `first_step` to the last; False when somebody asked to stop before it.

    `position` gives the samples consumed after a step. `at_edge` takes a step and whether somebody asks to stop, and
    says whether to leave.
    """
    for step in range(first_step, schedule.num_steps + 1):
        started = time.perf_counter()
        micro_batches = list(batches.at(position(step - 1)))
        # Processes that share a layer's matrices read the same sequences: one of them counts.
        counts = float(parallel.tensor_rank() == 0)
        num_tokens = sum(float(b.loss_mask.sum()) for b in micro_batches)
        global_tokens = _sum_over_processes([counts * num_tokens], device)[0]
        nats = torch.zeros((), device=device)
        for index, batch in enumerate(micro_batches):
            if index:
                engine.finish_micro_batch()
            nats += engine.accumulate(as_tensors(batch, device), global_tokens)
        # All processes meet here: so all learn of a request that reached one, and leave after the same step.
        total_nats, requests = _sum_over_processes([counts * nats.item(), float(stop.look())], device)
        loss, learning_rate, grad_norm = total_nats / global_tokens, schedule.learning_rate(step), math.nan
        skip_reason = guard.skip_reason_of_loss(loss)
        if skip_reason:
            engine.discard()
        else:
            grad_norm = engine.update(learning_rate)
            skip_reason = guard.skip_reason_of_norm(grad_norm)
        guard.note(loss, skip_reason)
        record = StepRecord(step, loss, learning_rate, grad_norm, time.perf_counter() - started, skip_reason)
        if at_edge(record, requests > 0):
            return step == schedule.num_steps
    return True


def as_tensors(batch: Batch, device: torch.device) -> list[torch.Tensor]:
    """What the model takes of a batch, on the device."""
    arrays = batch.arguments()
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    # From memory that is not pinned, a copy would wait until the GPU has done all that it was given before.
    return [torch.from_numpy(array).pin_memory().to(device, non_blocking=True) for array in arrays]


def _sum_over_processes(values: list[float], device: torch.device) -> list[float]:
    # float64: a count of tokens or a sum of nats over a large batch has more digits than float32.
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return [float(value) for value in total.tolist()]
