"""Validation: the loss on documents that are never trained on, in nats per token and bits per byte, also by source.

Bits per byte are of the text alone: the nats of its tokens, divided by ln 2 and by the UTF-8 bytes of their pieces. So
they do not depend on the tokenizer, and runs with different vocabularies can be compared. A decoder reads the windows
that step 8 reads, which gives the same number for the exported model. Control tokens have no bytes; their nats stand
apart: per end token (that of a document; in span corruption also that of each target) and per sentinel. The loss is the
mean over all predicted tokens, these included, as in training.

Training validates with it, and so does step 3's ``--evaluate``, which gives the number that the log has for a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


NUM_KINDS = 3
TEXT, END, SENTINEL = range(NUM_KINDS)
"""Kinds of predicted tokens, whose nats are summed apart."""


@dataclass(frozen=True)
class Score:
    """Loss over some tokens."""

    name: str
    loss: float
    """Nats per token, of every kind."""
    bits_per_byte: float
    """Of the text alone."""
    num_tokens: int
    end_nats: float | None = None
    """Nats per end token; None where none was predicted."""
    sentinel_nats: float | None = None
    """Nats per sentinel; None where none was predicted."""

    @classmethod
    def of(cls, name: str, nats: Sequence[float], counts: Sequence[float], num_bytes: float) -> Score:
        """Score of tokens whose losses sum to `nats`, these and their `counts` by kind; the text has `num_bytes`."""
        num_tokens = round(sum(counts))
        bits_per_byte = nats[TEXT] / math.log(2) / max(1, num_bytes)
        end, sentinel = (nats[kind] / counts[kind] if counts[kind] else None for kind in (END, SENTINEL))
        return cls(name, sum(nats) / max(1, num_tokens), bits_per_byte, num_tokens, end, sentinel)

    def of_control_tokens(self) -> list[tuple[str, float]]:
        """Name and nats of each kind of control token that was predicted."""
        kinds = (("end token", self.end_nats), ("sentinel", self.sentinel_nats))
        return [(name, nats) for name, nats in kinds if nats is not None]


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
            "valid_end_nats": self.whole.end_nats,
            "valid_tokens": self.whole.num_tokens,
        }
        if self.whole.sentinel_nats is not None:
            line["valid_sentinel_nats"] = self.whole.sentinel_nats
        if self.sources:
            line["valid_loss_by_source"] = [score.loss for score in self.sources]
            line["valid_bits_per_byte_by_source"] = [score.bits_per_byte for score in self.sources]
            line["valid_source_positions"] = list(self.positions)
        return line


class Validation:
    """The validation tokens of one process; a source that has none is left out."""

    def __init__(self, plan: RunPlan, device: torch.device, prefix: Path | None = None):
        """`prefix` is of other token files than the validation's: those of a test, which are one source."""
        config, all_sources = plan.config, plan.data.reading.sources
        self._device, self._micro_batch_size = device, config.micro_batch
        numbered = [(number, each) for number, each in enumerate(all_sources) if each.num_valid_tokens or prefix]
        self._positions, sources = tuple(number for number, _ in numbered), [each for _, each in numbered]
        self._names = [source.name for source in sources]
        self._token_bytes = plan.encoder.piece_bytes()
        self._kinds = np.full(plan.encoder.vocab_size, TEXT)
        self._kinds[plan.data.objective.sentinel_ids] = SENTINEL
        self._kinds[plan.encoder.eos_id] = END
        self._is_of_kind_VK = torch.eye(NUM_KINDS, dtype=torch.float64, device=device)[torch.from_numpy(self._kinds)]
        max_tokens = None if config.eval_tokens == "all" or prefix else config.eval_tokens
        self._tokens = plan.data.validation_batches(plan.encoder.eos_id, max_tokens, prefix)

    def __call__(self, module: torch.nn.Module, give_up: Callable[[], bool] | None = None) -> ValidationResult | None:
        """Evaluate the model; every process must call it.

        `give_up` is called by every process now and then, with the same answer in all; once it is True, the result is
        None.
        """
        rank, num_ranks = parallel.data_rank(), parallel.data_size()
        # Of each source: the nats of each kind of token; how many there are of each kind, and the bytes of the text.
        nats_PK = torch.zeros(len(self._names), NUM_KINDS, dtype=torch.float64, device=self._device)
        counts = np.zeros((len(self._names), NUM_KINDS + 1), dtype=np.int64)
        module.eval()
        with torch.no_grad():
            batches = self._tokens.batches(self._micro_batch_size, rank, num_ranks)
            for number, (part, batch) in enumerate(batches, 1):
                if give_up is not None and number % BATCHES_BETWEEN_LOOKS == 0 and give_up():
                    module.train()
                    return None
                inputs, labels_BT, mask_BT, *others = to_device(batch, self._device)
                nats_BT = module(inputs, labels_BT, mask_BT, *others, per_token=True) * mask_BT
                nats_PK[part] += nats_BT.flatten().double() @ self._is_of_kind_VK[labels_BT.flatten()]
                predicted = batch.labels[batch.loss_mask > 0]
                counts[part, :NUM_KINDS] += np.bincount(self._kinds[predicted], minlength=NUM_KINDS)
                counts[part, NUM_KINDS] += self._token_bytes[predicted].sum(dtype=np.int64)
        module.train()
        sums = torch.cat([nats_PK, torch.from_numpy(counts).to(nats_PK)], dim=1)
        torch.distributed.all_reduce(sums, group=parallel.data_group())
        whole = _score("all", sums.sum(dim=0))
        by_source = tuple(map(_score, self._names, sums))
        if len(by_source) == 1:
            return ValidationResult(whole, ())
        return ValidationResult(whole, by_source, self._positions)


def _score(name: str, sums: torch.Tensor) -> Score:
    nats, counts, num_bytes = sums.split([NUM_KINDS, NUM_KINDS, 1])
    return Score.of(name, nats.tolist(), counts.tolist(), num_bytes.item())


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
        "tokenizer_sha256": plan.encoder.sha256,
        **result.as_json(),
        "sources": [score.name for score in result.sources],
        "logged_valid_loss": logged,
    }
    write_json(path, record)
    rows = [("validation", f"{whole.loss:.4f} nats per token, {whole.bits_per_byte:.4f} bits per byte")]
    rows += [(f"nats per {name}", f"{nats:.4f}") for name, nats in whole.of_control_tokens()]
    rows += [(score.name, f"{score.loss:.4f}, {score.bits_per_byte:.4f}") for score in result.sources]
    rows.append(("tokens", f"{whole.num_tokens:,}"))
    if logged is not None:
        rows.append(("in the log", f"{logged:.4f} nats per token, so it differs by {abs(whole.loss - logged):.1e}"))
    summary(f"evaluated {folder}", [*rows, ("written to", str(path))])
