"""Validation: the loss on documents that are never trained on, in nats per token and bits per byte, also by source.

Bits per byte are of the text alone: the nats of its tokens, divided by ln 2 and by the UTF-8 bytes of their pieces. So
runs with different tokenizers can be compared. A decoder reads the windows that step 8 reads, which gives the same
number for the exported model. Control tokens have no bytes; their nats stand apart: per end token (that of a document;
in span corruption also that of each target) and per sentinel token. The loss is the mean over all predicted tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from zerokara import checkpoint
from zerokara.base.durable import write_json
from zerokara.base.progress import summary
from zerokara.model import parallel
from zerokara.training.compute.engine import Engine
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes.joining import Processes, join
from zerokara.training.run import build_model, to_device

BATCHES_BETWEEN_STOP_CHECKS = 16
"""Micro batches between two checks for a stop request: rare enough to cost nothing, and the request is seen soon."""
NUM_KINDS = 4
TEXT, END, SENTINEL, UNKNOWN = range(NUM_KINDS)
"""Kinds of predicted tokens, whose nats are summed separately. UNKNOWN is <unk>, whose text is not known."""


@dataclass(frozen=True)
class ValidationResult:
    """One validation, as the records take it."""

    line: dict[str, Any]
    """Numbers in metrics.jsonl."""
    facts: dict[str, Any]
    """Numbers for the checkpoint's state, which keeps the first of them, too."""
    badness: float
    """The number that is least for the best model."""
    messages: Sequence[str]
    """Lines in the log."""


GiveUp = Callable[[], bool] | None
"""Called by every process now and then, with the same answer in all; once it is True, a validation ends with None."""
Validation = Callable[[Engine, GiveUp], ValidationResult | None]
"""Validates the model of an engine; every process must call it."""


class LossValidation:
    """The validation tokens of one process; a source without any is left out."""

    def __init__(self, plan: RunPlan, device: torch.device, prefix: Path | None = None):
        """`prefix` is of other token files than the validation's: those of a test, which are one source."""
        config, encoder, training = plan.resolved, plan.encoder, plan.data.training
        sources = *training.sources, *training.held_out
        self._device, self._micro_batch_size = device, config.micro_batch
        self._positions = [number for number, source in enumerate(sources) if source.num_valid_tokens or prefix]
        names = [sources[number].name for number in self._positions]
        self.source_names = names if len(names) > 1 else []
        self._token_bytes = np.array([*map(len, encoder.token_texts)], dtype=np.int32)
        self._kinds = np.full(encoder.vocab_size, TEXT)
        self._kinds[[encoder.eos_id, *encoder.control_ids]] = END  # of a turn, too
        self._kinds[plan.data.objective.sentinel_ids] = SENTINEL
        if encoder.unk_id not in (-1, encoder.eos_id):
            self._kinds[encoder.unk_id] = UNKNOWN
        # With a dummy prefix a line, or a document, begins with a space that is not in the text, behind these.
        is_prefixed = self._token_bytes[encoder.encode("a")].sum() > 1 and not config.traits.is_encoder_decoder
        line_ends = [encoder.newline_id] if encoder.by_line else []
        self._before_lines = [encoder.before_text, *line_ends] if is_prefixed else []
        self._is_of_kind_VK = torch.eye(NUM_KINDS, dtype=torch.float64, device=device)[torch.from_numpy(self._kinds)]
        max_tokens = None if config.eval_tokens == "all" or prefix else config.eval_tokens
        self._tokens = plan.data.validation_batches(prefix or plan.data.valid_prefix, max_tokens)

    def __call__(self, module: torch.nn.Module, give_up: GiveUp = None) -> ValidationResult | None:
        """Validate the model; every process must call it."""
        # Of each source: the nats of each kind of token; how many there are of each kind, and the bytes of the text.
        nats_PK = torch.zeros(len(self._positions), NUM_KINDS, dtype=torch.float64, device=self._device)
        counts = np.zeros((len(self._positions), NUM_KINDS + 1), dtype=np.int64)
        module.eval()
        with torch.no_grad():
            batches = self._tokens.batches(self._micro_batch_size, parallel.data_rank(), parallel.data_size())
            for number, (part, batch) in enumerate(batches, 1):
                if give_up is not None and number % BATCHES_BETWEEN_STOP_CHECKS == 0 and give_up():
                    module.train()
                    return None
                inputs, labels_BT, mask_BT, *others = to_device(batch, self._device)
                nats_BT = module(inputs, labels_BT, mask_BT, *others, per_token=True) * mask_BT
                nats_PK[part] += nats_BT.flatten().double() @ self._is_of_kind_VK[labels_BT.flatten()]
                predicted = batch.labels[batch.loss_mask > 0]
                counts[part, :NUM_KINDS] += np.bincount(self._kinds[predicted], minlength=NUM_KINDS)
                counts[part, NUM_KINDS] += self._token_bytes[predicted].sum(dtype=np.int64)
                if self._before_lines:
                    before, after = (np.isin(ids, self._before_lines) for ids in (batch.inputs, batch.labels))
                    counts[part, NUM_KINDS] -= np.sum(before & ~after & (batch.loss_mask > 0))
        module.train()
        sums = torch.cat([nats_PK, torch.from_numpy(counts).to(nats_PK)], dim=1)
        torch.distributed.all_reduce(sums, group=parallel.data_group())
        line, by_source = _numbers(sums.sum(dim=0)), [_numbers(row) for row in sums]
        facts = {key: line[key] for key in ("valid_loss", "valid_bits_per_byte", "valid_end_nats")}
        messages = [f"valid_loss {line['valid_loss']:.4f}  {line['valid_bits_per_byte']:.4f} bits per byte of text"]
        for kind in ("end", "sentinel"):
            if (nats := line.get(f"valid_{kind}_nats")) is not None:
                messages[0] += f"  {nats:.3f} nats per {kind} token"
        if unknown := int(sums[:, NUM_KINDS + UNKNOWN].sum()):
            messages[0] += f"  without {unknown:,} unknown tokens"
        if self.source_names:
            for key in ("valid_loss", "valid_bits_per_byte"):
                line[f"{key}_by_source"] = [one[key] for one in by_source]
            line["valid_source_positions"] = self._positions  # in `input_jsonl` and `valid_jsonl`
            for name, one in zip(self.source_names, by_source, strict=True):
                messages.append(f"  {one['valid_loss']:.4f}  {one['valid_bits_per_byte']:.4f} bits per byte  {name}")
        return ValidationResult(line, facts, line["valid_loss"], messages)


def _numbers(sums: torch.Tensor) -> dict[str, Any]:
    """The numbers of tokens, from their nats and counts by kind and the bytes of their text."""
    nats, counts, (num_bytes,) = (part.tolist() for part in sums.split([NUM_KINDS, NUM_KINDS, 1]))
    numbers = {
        "valid_loss": sum(nats) / max(1, round(sum(counts))),
        "valid_bits_per_byte": nats[TEXT] / math.log(2) / max(1, num_bytes),
        "valid_end_nats": nats[END] / counts[END] if counts[END] else None,
        "valid_tokens": round(sum(counts)),
    }
    return numbers | ({"valid_sentinel_nats": nats[SENTINEL] / counts[SENTINEL]} if counts[SENTINEL] else {})


def of_loss(plan: RunPlan, processes: Processes) -> list[Validation]:
    """Return the validation of the loss, as the only one; none without validation data."""
    if not plan.data.num_valid_tokens:
        return []
    validation = LossValidation(plan, processes.device)
    return [lambda engine, give_up: validation(engine.module, give_up)]


def evaluate_checkpoint(plan: RunPlan, folder: Path) -> None:
    """Evaluate the checkpoint in `folder`; every training process calls it, the first one logs and writes.

    The weights alone are loaded: no optimizer, no ZeRO, so that any number of processes gives the same. The result goes
    into ``evaluation_step<N>.json`` in the folder that holds the checkpoint, which itself is never touched.
    """
    processes = join(plan)
    validation = LossValidation(plan, processes.device)
    result = validation(load_checkpoint(plan, folder, processes))
    assert result is not None
    if not processes.is_first:
        return
    step = checkpoint.read_state(folder).step
    path = folder.parent / f"evaluation_step{step}.json"
    record = {
        "checkpoint": folder.name,
        "step": step,
        "precision": plan.resolved.precision,
        "tokenizer_sha256": plan.encoder.sha256,
        **result.line,
        "sources": validation.source_names,
    }
    write_json(path, record)
    rows = [("", message) for message in (*result.messages, f"{result.line['valid_tokens']:,} tokens")]
    summary(f"evaluated {folder}", [*rows, ("written to", str(path))])


def load_checkpoint(plan: RunPlan, folder: Path, processes: Processes) -> torch.nn.Module:
    """Return the model with the weights of a checkpoint, on the device and as the run computes with them."""
    model = build_model(plan)
    weights = checkpoint.read_weights(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parallel.local_shard(weights[name], plan.shape.partition(name)))
    return model.to(torch.bfloat16 if plan.resolved.number_format == "bf16" else torch.float32).to(processes.device)
