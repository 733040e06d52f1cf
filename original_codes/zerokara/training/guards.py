"""Guards of the weights: which steps may reach them, and a check of the copies of tensor parallelism.

A step is skipped whose loss or gradient is not finite or, on request, whose loss is a spike: weights, optimizer moments
and the optimizer's step count stay as they were. It still counts as a step: the position in the data and the learning
rate move on, so that both stay functions of the step number. The guard's state is saved in the checkpoint, so a resumed
run judges as an unbroken one does.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from zerokara.base.errors import RunError
from zerokara.checkpoint import TrainingState
from zerokara.config.engine import MonitoringSettings
from zerokara.model import parallel
from zerokara.model.builder import Model
from zerokara.samples.batches import Batches
from zerokara.samples.packed_tokens import DataPlan
from zerokara.training.run import to_device

WINDOW_STEPS = 100
"""Most recent good losses that a loss spike is measured against."""
FEWEST_STEPS = 20
"""Good losses before any is called a spike: the loss falls steeply at the start, and a few values have no spread."""
MOST_SEQUENCES = 3
"""Sequences named if all losses are finite: those of the highest loss."""


class MustEnd(RunError):
    """Too many steps in a row were skipped, or processes hold different weights; raised in all at the same step."""


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
    """Reason why the step was skipped; empty where it was not."""
    stop_requested: bool = False
    """True if any process was asked to stop; all processes know alike, and leave after the same step."""
    num_pairs: float = 0.0
    """`Batch.num_pairs` of the global batch."""


class StepGuard:
    """Decides which steps are skipped; every process decides alike, since all of them know the same losses."""

    def __init__(self, config: MonitoringSettings, state: TrainingState | None = None):
        """Restore the guard from `state`, if there is one; `spike_sigmas` and `max_skipped_steps` are the settings."""
        self._spike_sigmas, self._max_skipped_steps = config.spike_sigmas, config.max_skipped_steps
        self.skipped_steps = state.skipped_steps if state else 0
        self.skipped_in_row = state.skipped_in_row if state else 0
        self.recent_losses = state.recent_losses if state else ()

    def skip_reason_of_loss(self, loss: float) -> str:
        """Return why a step with this loss must not reach the weights; empty if it may."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        losses = self.recent_losses
        if not self._spike_sigmas or len(losses) < FEWEST_STEPS:
            return ""
        mean = math.fsum(losses) / len(losses)
        deviation = math.sqrt(math.fsum((past - mean) ** 2 for past in losses) / len(losses))
        if loss <= mean + self._spike_sigmas * deviation:
            return ""
        distance = f"{(loss - mean) / deviation:.1f} standard deviations" if deviation else "far"
        return (
            f"loss spike: {loss:.4f} is {distance} above {mean:.4f}, the mean of the last {len(losses)} good "
            f"steps (spike_sigmas is {self._spike_sigmas:g})"
        )

    def note(self, loss: float, skip_reason: str) -> None:
        """Remember a step and whether it was skipped."""
        if skip_reason:
            self.skipped_steps += 1
            self.skipped_in_row += 1
        else:
            self.skipped_in_row = 0
            self.recent_losses = (*self.recent_losses, loss)[-WINDOW_STEPS:]

    def check_skipped_in_row(self, step: int, reason: str) -> None:
        """Raise MustEnd where the steps skipped in a row, `step` included, are one too many."""
        if self.skipped_in_row > self._max_skipped_steps:
            raise MustEnd(
                f"step {step}: {reason}; {self.skipped_in_row} skipped in a row, and max_skipped_steps is "
                f"{self._max_skipped_steps}. The weights are unchanged. Look at the documents named above; resume "
                "from the newest checkpoint with a lower learning rate (--set lr=…), or allow more skipped steps "
                "(--set max_skipped_steps=…)"
            )


def find_bad_samples(
    module: torch.nn.Module, batches: Batches, training: DataPlan, consumed: int
) -> list[dict[str, Any]]:
    """Return the sequences of the batch at `consumed` whose loss is not finite, or else those of the highest loss.

    Each is an entry of ``bad_samples`` (docs/metrics.md), with its documents. Every process must call it.
    """
    device = next(module.parameters()).device
    losses = torch.zeros(batches.layout.global_batch_size, dtype=torch.float64, device=device)
    module.eval()
    with torch.no_grad():
        for position, batch in batches.single_samples(consumed):
            nats = module(*to_device(batch, device)).double() / max(1.0, float(batch.loss_mask.sum()))
            if parallel.tensor_rank() == 0:  # tensor-parallel ranks compute the same sequences: one of them counts
                losses[position - consumed] = nats
    module.train()
    torch.distributed.all_reduce(losses)
    chosen = (~losses.isfinite()).nonzero().flatten()
    if not len(chosen):
        chosen = losses.argsort(descending=True, stable=True)[:MOST_SEQUENCES]
    epochs, samples = batches.order.at_many(consumed + chosen.cpu().numpy())
    found = []
    columns = chosen, losses[chosen], samples, epochs
    for index, loss, sample, epoch in zip(*(column.tolist() for column in columns), strict=True):
        documents: list[dict[str, Any]] = []
        for source_index, number in batches.tokens.documents(sample, epoch, training.sources):
            source = training.sources[source_index].name
            if documents and documents[-1]["source"] == source and documents[-1]["last"] == number - 1:
                documents[-1]["last"] = number
            else:  # packed examples need not be consecutive
                documents.append({"source": source, "first": number, "last": number})
        known = loss if math.isfinite(loss) else str(loss)  # JSON has no nan
        found.append({"position": consumed + index, "sample": sample, "loss": known, "documents": documents})
    return found


class DivergenceCheck:
    """Compares the replicated weights of tensor-parallel processes (norms, biases, routers, experts), bit for bit,
    before each validation and each save: each process updates its own copy.

    Copies of data parallelism cannot drift apart: DeepSpeed gathers them from their owners after each step.
    """

    def __init__(self, model: Model, step: int):
        """`model` is the one that the engine trains; `step` is that of the weights it begins with."""
        partition = model.shape.partition
        self._copies = {name: each for name, each in model.named_parameters() if partition(name) is None}
        self._equal_at = step

    def check(self, step: int) -> None:
        """Compare the weights after `step`, unless that is done; every process must call it.

        Raises:
            MustEnd: processes differ; names the first parameter, and the steps in which it happened.
        """
        if parallel.tensor_size() == 1 or step == self._equal_at:
            return
        own = torch.stack([checksum(_held(each)).to(each.device) for each in self._copies.values()])
        gathered = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(gathered, own)
        sums = torch.stack(gathered).unflatten(0, (-1, parallel.tensor_size()))  # [data ranks, tensor ranks, copies]
        differs = (sums != sums[:, :1]).any(0).any(0).tolist()
        if any(differs):
            raise MustEnd(
                f"steps {self._equal_at + 1} to {step}: tensor-parallel processes hold different weights, first in "
                f"{list(self._copies)[differs.index(True)]}: they no longer train the same model. Nothing was saved "
                "since; the next start resumes from the newest checkpoint. If it happens again, suspect the memory or "
                "the network of one of these devices"
            )
        self._equal_at = step


def _held(parameter: Any) -> Tensor:
    """What this process holds of a parameter: under ZeRO 3 a part, without the padding that may stand behind it."""
    if (part := getattr(parameter, "ds_tensor", None)) is None:
        return parameter.detach()
    return part.detach()[: max(0, parameter.ds_numel - parallel.data_rank() * part.numel())]


def checksum(elements: Tensor) -> Tensor:
    """The bits of fp32 or bf16 elements as one int64: a sum modulo 2^64 of the rows' sums, each times an odd number.

    So any change of a single element changes it.
    """
    bits = elements.view(torch.int32 if elements.dtype == torch.float32 else torch.int16)
    row_sums = bits.flatten(1).sum(dim=1, dtype=torch.int64) if bits.dim() > 1 else bits.long()
    return (row_sums * (2 * torch.arange(len(row_sums), device=bits.device) + 1)).sum()
