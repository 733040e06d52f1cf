"""Validation: the loss on documents that are never trained on, in nats per token and bits per byte, also by source.

Bits per byte is the sum of nats, divided by ln 2 and by the UTF-8 bytes of the text that was predicted. It does not
depend on the tokenizer, so runs with different vocabularies can be compared. End-of-document and sentinel tokens cost
nats and have no bytes.

Training validates with it, and so does step 3's ``--evaluate``, which gives the number that the log has for a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from zerokara import checkpoint
from zerokara.durable import write_json
from zerokara.model import parallel
from zerokara.model.builder import Model
from zerokara.progress import summary
from zerokara.training.batch_loader import to_device
from zerokara.training.monitoring import metrics
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes.joining import Processes
from zerokara.training.run import build_model, join

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
    """One for each source that has validation documents; empty if only one has."""
    positions: tuple[int, ...] = ()
    """Where each of them stands in `input_jsonl`."""

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
            line["valid_source_positions"] = list(self.positions)
        return line


class Validation:
    """The validation tokens of one process; a source that has none is left out."""

    def __init__(self, plan: RunPlan, device: torch.device, prefix: Path | None = None):
        """`prefix` is of other token files than the validation's: those of a test."""
        config = plan.config
        self._device, self._micro_batch_size = device, config.micro_batch
        numbered = [(number, each) for number, each in enumerate(plan.reading.sources) if each.num_valid_tokens]
        self._positions, sources = tuple(number for number, _ in numbered), [each for _, each in numbered]
        self._names = [source.name for source in sources]
        self._token_bytes = plan.encoder.piece_bytes()
        max_tokens = None if config.eval_tokens == "all" else config.eval_tokens
        self._tokens = plan.reading.validation_batches(
            prefix or plan.data.valid_prefix, plan.objective, plan.encoder.eos_id, max_tokens
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
        if len(by_source) == 1:
            return ValidationResult(whole, ())
        return ValidationResult(whole, by_source, self._positions)


def evaluate_checkpoint(plan: RunPlan, folder: Path) -> None:
    """Evaluate the checkpoint in `folder`; every training process calls it, the first one logs and writes.

    The weights alone are loaded, rounded as the run computes with them, whole in each process (or cut as
    `tensor_parallel_size` says): no optimizer, no ZeRO, so that any number of processes gives the same. The result goes
    into ``evaluation_step<N>.json`` in the folder that holds the checkpoint, which itself is never touched.
    """
    processes = join(plan)
    result = Validation(plan, processes.device)(load_checkpoint(plan, folder, processes))
    assert result is not None
    if processes.is_first:
        _report(plan, folder, result)


def load_checkpoint(plan: RunPlan, folder: Path, processes: Processes) -> Model:
    """Return the model with the weights of a checkpoint, on the device and as the run computes with them."""
    model = build_model(plan, processes)
    weights = checkpoint.read_weights(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.sharding.local(name, weights[name]))
    return model.to(torch.bfloat16 if plan.config.precision == "bf16" else torch.float32).to(processes.device)


def _report(plan: RunPlan, folder: Path, result: ValidationResult) -> None:
    step, whole = checkpoint.read_state(folder).step, result.whole
    # What the run itself found at that step, if it validated there.
    found = [line for line in metrics.read(folder.parent) if line["step"] == step and "valid_loss" in line]
    logged = found[-1]["valid_loss"] if found else None
    path = folder.parent / f"evaluation_step{step}.json"
    record: dict[str, Any] = {
        "checkpoint": folder.name,
        "step": step,
        "precision": plan.config.precision,
        "tokenizer_sha256": plan.tokenizer_sha256,
        **result.as_json(),
        "sources": [score.name for score in result.sources],
        "logged_valid_loss": logged,
    }
    write_json(path, record)
    rows = [("validation", f"{whole.loss:.4f} nats per token, {whole.bits_per_byte:.4f} bits per byte")]
    rows += [(score.name, f"{score.loss:.4f}, {score.bits_per_byte:.4f}") for score in result.sources]
    rows.append(("tokens", f"{whole.num_tokens:,}"))
    if logged is not None:
        rows.append(("in the log", f"{logged:.4f} nats per token, so it differs by {abs(whole.loss - logged):.1e}"))
    summary(f"evaluated {folder}", [*rows, ("written to", str(path))])
