"""Validation: nats a token and bits a byte over documents that are never trained on.

Bits per byte is the sum of nats over the UTF-8 bytes of the text that was predicted, over ln 2. It does not depend on
the tokenizer, so that runs with other vocabularies can be compared; the end of a document costs nats and has no bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed

from zerokara.model import parallel
from zerokara.samples.evaluation import EvaluationTokens
from zerokara.samples.objective import Objective
from zerokara.training.loop import as_tensors


@dataclass(frozen=True)
class ValidationResult:
    """What a validation found."""

    loss: float
    """Nats a token."""
    bits_per_byte: float
    num_tokens: int


class Validation:
    """The validation tokens of one process."""

    def __init__(
        self,
        tokens: EvaluationTokens,
        piece_bytes: np.ndarray,
        objective: Objective,
        micro_batch_size: int,
        device: torch.device,
    ):
        self._tokens, self._objective = tokens, objective
        self._micro_batch_size, self._device = micro_batch_size, device
        self._num_bytes = int(piece_bytes[np.asarray(tokens.tokens, dtype=np.int64)].sum())

    def __call__(self, module: torch.nn.Module) -> ValidationResult:
        """Evaluate; every process must call it."""
        rank, num_ranks = parallel.data_rank(), parallel.data_size()
        nats = torch.zeros((), dtype=torch.float64, device=self._device)
        module.eval()
        with torch.no_grad():
            for batch in self._tokens.batches(self._micro_batch_size, rank, num_ranks, self._objective):
                nats += module(*as_tensors(batch, self._device)).double()
        module.train()
        torch.distributed.all_reduce(nats, group=parallel.data_group())
        total = nats.item()
        return ValidationResult(
            loss=total / self._tokens.num_tokens,
            bits_per_byte=total / math.log(2) / max(1, self._num_bytes),
            num_tokens=self._tokens.num_tokens,
        )
