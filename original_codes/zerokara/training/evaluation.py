"""Validation: nats a token and bits a byte over documents that are never trained on, together and source by source.

Bits per byte is the sum of nats over the UTF-8 bytes of the text that was predicted, over ln 2. It does not depend on
the tokenizer, so that runs with other vocabularies can be compared; the end of a document costs nats and has no bytes,
nor has the sentinel of a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed

from zerokara.model import parallel
from zerokara.samples.evaluation import EvaluationBatches, evaluation_batches
from zerokara.training.batch_loader import to_device
from zerokara.training.planning.run_plan import RunPlan as Preparation
from zerokara.training.planning.run_plan import has_validation

BATCHES_BETWEEN_LOOKS = 16
"""Micro batches between two looks for a request to stop: the looks cost nothing beside them, and it is soon seen."""


@dataclass(frozen=True)
class Score:
    """How well some tokens were predicted."""

    name: str
    loss: float
    """Nats a token."""
    bits_per_byte: float
    num_tokens: int

    @classmethod
    def of(cls, name: str, nats: float, num_tokens: int, num_bytes: int) -> Score:
        """From the sum over the tokens."""
        return cls(name, nats / max(1, num_tokens), nats / math.log(2) / max(1, num_bytes), num_tokens)


@dataclass(frozen=True)
class ValidationResult:
    """What a validation found."""

    whole: Score
    sources: tuple[Score, ...]
    """Each source's; empty where there is but one."""

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.whole.loss

    @property
    def bits_per_byte(self) -> float:
        """Nats a byte over ln 2."""
        return self.whole.bits_per_byte

    def as_json(self) -> dict[str, Any]:
        """The numbers, as they stand in a line of metrics.jsonl."""
        line: dict[str, Any] = {
            "valid_loss": self.loss,
            "valid_bits_per_byte": self.bits_per_byte,
            "valid_tokens": self.whole.num_tokens,
        }
        if self.sources:
            line["valid_loss_by_source"] = [score.loss for score in self.sources]
            line["valid_bits_per_byte_by_source"] = [score.bits_per_byte for score in self.sources]
        return line


class Validation:
    """The validation tokens of one process."""

    def __init__(
        self,
        tokens: EvaluationBatches,
        piece_bytes: np.ndarray,
        micro_batch_size: int,
        device: torch.device,
        sources: Sequence[str] = (),
    ):
        """`sources` names the parts of `tokens`."""
        self._tokens, self._piece_bytes = tokens, piece_bytes
        self._micro_batch_size, self._device = micro_batch_size, device
        self._names = list(sources) or [""]

    def __call__(self, module: torch.nn.Module, give_up: Callable[[], bool] | None = None) -> ValidationResult | None:
        """Evaluate; every process must call it.

        `give_up` is asked now and then by every process; where it says yes (to all alike), the result is None.
        """
        rank, num_ranks = parallel.data_rank(), parallel.data_size()
        nats = torch.zeros(len(self._names), dtype=torch.float64, device=self._device)
        counts = np.zeros((2, len(self._names)), dtype=np.int64)  # tokens that were predicted, and their bytes
        module.eval()
        with torch.no_grad():
            batches = self._tokens.batches(self._micro_batch_size, rank, num_ranks)
            for number, (part, batch) in enumerate(batches, 1):
                if give_up is not None and number % BATCHES_BETWEEN_LOOKS == 0 and give_up():
                    module.train()
                    return None
                nats[part] += module(*to_device(batch, self._device)).double()
                predicted = batch.labels[batch.loss_mask > 0]
                counts[:, part] += len(predicted), self._piece_bytes[predicted].sum(dtype=np.int64)
        module.train()
        found = torch.cat([nats, torch.from_numpy(counts).flatten().to(nats)])
        torch.distributed.all_reduce(found, group=parallel.data_group())
        return self._result(*found.view(3, -1).tolist())

    def _result(
        self, nats: Sequence[float], num_tokens: Sequence[float], num_bytes: Sequence[float]
    ) -> ValidationResult:
        tokens, sizes = [round(number) for number in num_tokens], [round(number) for number in num_bytes]
        whole = Score.of("all", sum(nats), sum(tokens), sum(sizes))
        each = tuple(Score.of(*one) for one in zip(self._names, nats, tokens, sizes, strict=True))
        return ValidationResult(whole, each if len(each) > 1 else ())


def start_validation(preparation: Preparation, device: torch.device) -> Validation | None:
    """The validation of a run, or None where step 2 kept no documents for it."""
    config, paths = preparation.config, preparation.token_paths
    if not has_validation(paths):
        return None
    encoder = preparation.encoder
    # A source without validation documents has no part in it.
    sources = [source for source in preparation.reading.sources if source.num_valid_tokens]
    return Validation(
        evaluation_batches(
            paths.valid,
            preparation.objective,
            encoder.eos_id,
            max_tokens=None if config.eval_tokens == "all" else config.eval_tokens,
            part_tokens=[source.num_valid_tokens for source in sources],
        ),
        encoder.piece_bytes(),
        config.micro_batch,
        device,
        [source.name for source in sources],
    )
