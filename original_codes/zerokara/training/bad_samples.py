"""The documents that are to blame for a skipped step: the loss of every sequence of its batch is computed by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed

from zerokara.model import parallel
from zerokara.samples.batches import Batches
from zerokara.samples.reading import Reading
from zerokara.training.batch_loader import to_device

MOST_SEQUENCES = 3
"""Sequences named if all losses are finite: those of the highest loss."""
MOST_RANGES = 8
"""Ranges of documents named for one sequence."""


@dataclass(frozen=True)
class BadSample:
    """A sequence that is to blame."""

    position: int
    """Position in the order of the run."""
    sample: int
    """Number of the sample in the token files."""
    loss: float
    """Nats per token, with the weights before the step."""
    documents: tuple[tuple[str, int, int], ...]
    """Source, and the first and last of consecutive training documents of it in the sequence, counted from 0; of a
    fine-tuning, of its examples."""

    def as_json(self) -> dict[str, Any]:
        """Its entry in metrics.jsonl; a loss that is not finite is a string, since JSON has no nan."""
        documents = [{"source": source, "first": first, "last": last} for source, first, last in self.documents]
        loss = self.loss if math.isfinite(self.loss) else str(self.loss)
        return {"position": self.position, "sample": self.sample, "loss": loss, "documents": documents}

    def __str__(self) -> str:
        documents = [
            f"document{'s' if last > first else ''} {first}{f' to {last}' if last > first else ''} of {source}"
            for source, first, last in self.documents[:MOST_RANGES]
        ]
        more = len(self.documents) - MOST_RANGES
        return f"loss {self.loss:.4f}: {', '.join(documents)}" + (f" and {more} more" if more > 0 else "")


def find(module: torch.nn.Module, batches: Batches, reading: Reading, consumed: int) -> list[BadSample]:
    """Return the sequences of the batch at `consumed` whose loss is not finite, or else those of the highest loss.

    Every process must call it; the cost is a forward pass over the batch, sequence by sequence.
    """
    losses = _loss_of_each(module, batches, consumed)
    chosen = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
    chosen = chosen or sorted(range(len(losses)), key=lambda index: -losses[index])[:MOST_SEQUENCES]
    _, samples = batches.order.at_many(consumed + np.array(chosen, dtype=np.int64))
    return [
        BadSample(consumed + index, int(sample), losses[index], _document_ranges(reading, int(sample)))
        for index, sample in zip(chosen, samples, strict=True)
    ]


def _loss_of_each(module: torch.nn.Module, batches: Batches, consumed: int) -> list[float]:
    """Nats per token of each sequence of the global batch, in the order of the run."""
    device = next(module.parameters()).device
    losses = torch.zeros(batches.layout.global_batch_size, dtype=torch.float64, device=device)
    # Tensor-parallel ranks compute the same sequences: one of them counts.
    counts = parallel.tensor_rank() == 0
    module.eval()
    with torch.no_grad():
        for position, batch in batches.single_samples(consumed):
            nats = module(*to_device(batch, device)).double() / max(1.0, float(batch.loss_mask.sum()))
            if counts:
                losses[position - consumed] = nats
    module.train()
    torch.distributed.all_reduce(losses)
    return [float(loss) for loss in losses.tolist()]


def _document_ranges(reading: Reading, sample: int) -> tuple[tuple[str, int, int], ...]:
    """Source, first and last of each row of consecutive documents; packed examples need not be consecutive."""
    ranges: list[tuple[str, int, int]] = []
    for place in reading.documents_in(sample):
        name, first = reading.sources[place.source].name, place.document
        if ranges and ranges[-1][0] == name and ranges[-1][2] == place.document - 1:
            first = ranges.pop()[1]
        ranges.append((name, first, place.document))
    return tuple(ranges)
