"""The micro batches of one process, step by step, the next step's prepared while the device works on this one's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from zerokara.samples.batches import Batches
from zerokara.samples.objective import Batch


@dataclass(frozen=True)
class StepBatches:
    """What one process computes in one step."""

    micro_batches: list[list[Tensor]]
    """For each micro batch the model's arguments, with labels; in main memory, pinned where the device is a GPU."""
    num_tokens: float
    """Predicted tokens in them."""


class BatchLoader:
    """Gives the batches of a step, and prepares those of the next step in a thread; to be closed."""

    def __init__(self, batches: Batches, consumed_before: Callable[[int], int], last_step: int, device: torch.device):
        """`consumed_before` gives the samples that the run has consumed before a step."""
        self._batches, self._consumed_before, self._last_step = batches, consumed_before, last_step
        self._pins_memory = device.type == "cuda"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._next: tuple[int, Future[StepBatches]] | None = None

    def take(self, step: int) -> StepBatches:
        """Return the batches of `step`, and begin to prepare those of the step after it."""
        if self._next is None or self._next[0] != step:
            self._next = (step, self._thread.submit(self._prepare, step))
        ready = self._next[1].result()
        self._next = (step + 1, self._thread.submit(self._prepare, step + 1)) if step < self._last_step else None
        return ready

    def close(self) -> None:
        """Prepare nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, step: int) -> StepBatches:
        batches = list(self._batches.at(self._consumed_before(step)))
        num_tokens = sum(float(batch.loss_mask.sum()) for batch in batches)
        return StepBatches([as_tensors(batch, self._pins_memory) for batch in batches], num_tokens)


def as_tensors(batch: Batch, pins_memory: bool = False) -> list[Tensor]:
    """Return the model's arguments of a batch, with labels.

    From memory that is not pinned a copy would wait until the GPU has done all that it was given before.
    """
    tensors = [torch.from_numpy(array) for array in batch.arguments()]
    return [tensor.pin_memory() for tensor in tensors] if pins_memory else tensors


def to_device(batch: Batch, device: torch.device) -> list[Tensor]:
    """Return the model's arguments of a batch, on the device."""
    return [tensor.to(device, non_blocking=True) for tensor in as_tensors(batch, pins_memory=device.type == "cuda")]
