"""Validation: the loss on documents that are never trained on, in nats per token and bits per byte, also by source.

Bits per byte is the sum of nats, divided by ln 2 and by the UTF-8 bytes of the text that was predicted. It does not
depend on the tokenizer, so runs with different vocabularies can be compared. End-of-document and sentinel tokens cost
nats and have no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed

from zerokara.model import parallel
from zerokara.samples.evaluation import evaluation_batches
from zerokara.training.batch_loader import to_device
from zerokara.training.planning.run_plan import RunPlan

BATCHES_BETWEEN_LOOKS = 16
"""Micro batches between two checks for a stop request: rare enough to cost nothing, and the request is seen soon."""


@dataclass(frozen=True)
class Score:
    """Loss over some tokens."""

    name: str
    loss: float
    """Nats per token."""
    bits_per_byte: float
    num_tokens: int

    @classmethod
    def of(cls, name: str, nats: float, num_tokens: int, num_bytes: int) -> Score:
        """Score of tokens whose losses sum to `nats`."""
        return cls(name, nats / max(1, num_tokens), nats / math.log(2) / max(1, num_bytes), num_tokens)


@dataclass(frozen=True)
class ValidationResult:
    """Scores of one validation."""

    whole: Score
    sources: tuple[Score, ...]
    """One for each source; empty if there is only one source."""

    def as_json(self) -> dict[str, Any]:
        """The numbers of its line in metrics.jsonl."""
        line: dict[str, Any] = {
            "valid_loss": self.whole.loss,
            "valid_bits_per_byte": self.whole.bits_per_byte,
            "valid_tokens": self.whole.num_tokens,
        }
        if self.sources:
            line["valid_loss_by_source"] = [score.loss for score in self.sources]
            line["valid_bits_per_byte_by_source"] = [score.bits_per_byte for score in self.sources]
        return line


class Validation:
    """The validation tokens of one process; a source that has none is left out."""

    def __init__(self, plan: RunPlan, device: torch.device):
        self._device, self._micro_batch_size, eval_tokens = device, plan.config.micro_batch, plan.config.eval_tokens
        sources = [source for source in plan.reading.sources if source.num_valid_tokens]
        self._names = [source.name for source in sources]
        self._token_bytes = plan.encoder.piece_bytes()
        self._tokens = evaluation_batches(
            plan.token_paths.valid,
            plan.objective,
            plan.encoder.eos_id,
            max_tokens=None if eval_tokens == "all" else eval_tokens,
            part_tokens=[source.num_valid_tokens for source in sources],
        )

    def __call__(self, module: torch.nn.Module, give_up: Callable[[], bool] | None = None) -> ValidationResult | None:
        """Evaluate the model; every process must call it.

        `give_up` is called by every process now and then, with the same answer in all; once it is True, the result is
        None.
        """
        rank, num_ranks = parallel.data_rank(), parallel.data_size()
        nats = torch.zeros(len(self._names), dtype=torch.float64, device=self._device)
        counts = np.zeros((2, len(self._names)), dtype=np.int64)  # predicted tokens, and their bytes
        module.eval()
        with torch.no_grad():
            batches = self._tokens.batches(self._micro_batch_size, rank, num_ranks)
            for number, (part, batch) in enumerate(batches, 1):
                if give_up is not None and number % BATCHES_BETWEEN_LOOKS == 0 and give_up():
                    module.train()
                    return None
                nats[part] += module(*to_device(batch, self._device)).double()
                predicted = batch.labels[batch.loss_mask > 0]
                counts[:, part] += len(predicted), self._token_bytes[predicted].sum(dtype=np.int64)
        module.train()
        sums = torch.cat([nats, torch.from_numpy(counts).flatten().to(nats)])
        torch.distributed.all_reduce(sums, group=parallel.data_group())
        all_nats, *all_counts = sums.view(3, -1).tolist()
        num_tokens, num_bytes = ([round(count) for count in each] for each in all_counts)
        whole = Score.of("all", sum(all_nats), sum(num_tokens), sum(num_bytes))
        by_source = tuple(map(Score.of, self._names, all_nats, num_tokens, num_bytes))
        return ValidationResult(whole, by_source if len(by_source) > 1 else ())
