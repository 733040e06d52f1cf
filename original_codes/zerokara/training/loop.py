"""The training loop: batch → loss → backward → clip → update → record. What happens at a step's edge is handed in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed

from zerokara.errors import RunError
from zerokara.model import parallel
from zerokara.samples.batches import Batches
from zerokara.samples.objective import Batch, Objective
from zerokara.training.schedule import Schedule
from zerokara.training.stopping import StopRequest

if TYPE_CHECKING:
    from zerokara.training.engine import Engine


@dataclass(frozen=True)
class StepRecord:
    """One update of the weights."""

    step: int
    loss: float
    """Nats a token, the mean over the global batch."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    seconds: float


def train(
    engine: Engine,
    batches: Batches,
    objective: Objective,
    schedule: Schedule,
    first_step: int,
    position: Callable[[int], int],
    device: torch.device,
    stop: StopRequest,
    at_edge: Callable[[StepRecord], None],
) -> bool:
    """Train steps `first_step` to the last; False when `stop` ended it before.

    `position` gives the samples consumed after a step.

    Raises:
        RunError: a loss or a gradient is not finite. A loss is seen before it reaches the weights; a gradient before
            they are saved: the newest checkpoint is good either way.
    """
    for step in range(first_step, schedule.num_steps + 1):
        started = time.perf_counter()
        micro_batches = [objective(ids, None) for ids in batches.at(position(step - 1))]
        # Processes that share a layer's matrices read the same sequences: one of them counts.
        counts = float(parallel.tensor_rank() == 0)
        num_tokens = sum(float(b.loss_mask.sum()) for b in micro_batches)
        global_tokens = _sum_over_processes([counts * num_tokens], device)[0]
        nats = torch.zeros((), device=device)
        for index, batch in enumerate(micro_batches):
            if index:
                engine.finish_micro_batch()
            ids, labels, mask, *segments = as_tensors(batch, device)
            nats += engine.accumulate(ids, labels, mask, global_tokens, *segments)
        total_nats, asked_to_stop = _sum_over_processes([counts * nats.item(), float(bool(stop.reason))], device)
        loss = total_nats / global_tokens
        _require_finite("loss", loss, step)
        learning_rate = schedule.learning_rate(step)
        grad_norm = engine.update(learning_rate)
        _require_finite("norm of the gradient", grad_norm, step)
        at_edge(StepRecord(step, loss, learning_rate, grad_norm, time.perf_counter() - started))
        if asked_to_stop:  # one process was asked: all leave together
            return step == schedule.num_steps
    return True


def as_tensors(batch: Batch, device: torch.device) -> list[torch.Tensor]:
    """Ids, labels, mask, and segments where documents are isolated, on the device, each [B, S]."""
    arrays = [batch.inputs, batch.labels, batch.loss_mask]
    if batch.segments is not None:
        arrays.append(batch.segments)
    return [torch.from_numpy(array).to(device, non_blocking=True) for array in arrays]


def _sum_over_processes(values: list[float], device: torch.device) -> list[float]:
    # float64: a count of tokens or a sum of nats over a large batch has more digits than float32.
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return [float(value) for value in total.tolist()]


def _require_finite(what: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise RunError(
            f"step {step}: the {what} is {value}, so the weights would be spoilt. The newest checkpoint is good: "
            "run the same command with a lower learning rate (--set lr=…) to go on from it"
        )
