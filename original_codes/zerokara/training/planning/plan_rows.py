"""A run plan as rows for people: name and value, as shown at every start."""

from __future__ import annotations

import numpy as np

from zerokara.errors import Fault, UserError
from zerokara.progress import count_text
from zerokara.tokens.indexed import IndexedTokens
from zerokara.training.compute import optimizers, updater
from zerokara.training.planning.consumption import stage_title
from zerokara.training.planning.disk_space import checkpoint_text
from zerokara.training.planning.run_plan import RunPlan, template_path

_HEAD_TOKENS = 24
_CHECKED_IDS = 1 << 20
"""Ids whose range is checked, at the beginning and at the end of the data."""


def plan_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Return what the run will do, by name."""
    config, shape, schedule = plan.config, plan.shape, plan.schedule
    train, valid = count_text(plan.data.num_train_tokens), count_text(plan.data.num_valid_tokens)
    length = (
        f"{schedule.num_steps:,} steps × {config.global_batch} sequences = {count_text(schedule.num_tokens)} "
        f"tokens = {schedule.epochs_at(schedule.num_steps):.3f} epochs; {schedule.warmup_steps} warm-up steps"
    )
    micro_steps = config.global_batch // (config.micro_batch * plan.data_parallel_size)
    batch = f"micro batch {config.micro_batch}, {micro_steps} gradient accumulation step{'s' * (micro_steps > 1)}"
    template = template_path(config.deepspeed_template).name
    updater_lines = updater.plan_lines(
        plan.updater, config.zero_stage, plan.data_parallel_size, template, plan.template, plan.nodes, micro_steps
    )
    processes = f"{plan.num_processes}" + (f" on {plan.nodes} machines" if plan.nodes > 1 else "")
    return [
        ("model", f"{config.architecture}, {shape.size_text}, {_length_text(plan)}"),
        ("data", f"{train} training tokens, {valid} validation tokens, {_order_text(plan)}"),
        *plan.data.plan_rows,
        ("length", length),
        ("processes", f"{processes}, ZeRO stage {config.zero_stage}, {config.precision}, {batch}"),
        *(("recipe" if not number else "", each.text) for number, each in enumerate(plan.advice)),
        *(("optimizer", line) for line in optimizers.plan_lines(config, shape)),
        *(("updater", line) for line in updater_lines),
        ("baseline", baseline_text(plan.data.unigram_entropy)),
        ("checkpoint", checkpoint_text(plan)),
    ]


def data_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Return how the data begins, and its tokenizer.

    Raises:
        UserError: an id of the data is none of the tokenizer's.
    """
    path, vocab_size = plan.data.train_prefix, plan.encoder.vocab_size
    tokens = IndexedTokens(path).tokens
    for part in (tokens[:_CHECKED_IDS], tokens[-_CHECKED_IDS:]):
        largest = int(part.max(initial=0))
        if largest >= vocab_size:
            rule = f"holds the id {largest}; the tokenizer has {vocab_size} pieces"
            raise UserError(Fault(where=f"{path}.bin", rule=rule, remedy="run step 2 again with --redo"))
    head = np.asarray(tokens[:_HEAD_TOKENS], dtype=np.int64)
    return [
        ("data begins", f"{' '.join(str(one) for one in head[:8])} … = {plan.encoder.decode(head.tolist())!r}"),
        ("tokenizer", f"sha256 {plan.encoder.sha256[:12]}…, the one that the data was made with"),
    ]


def baseline_text(unigram_entropy: float) -> str:
    """Return the loss below which a model has learned more than token frequencies, for people."""
    return f"{unigram_entropy:.3f} nats per token: the unigram entropy, the loss of knowing token frequencies alone"


def _length_text(plan: RunPlan) -> str:
    lengths = plan.data.objective.lengths
    if not lengths.num_noise_tokens:
        return f"sequences of {lengths.input} tokens"
    return (
        f"samples of {lengths.raw} tokens with {lengths.num_spans} masked spans: encoder input {lengths.input} tokens, "
        f"decoder target {lengths.target} tokens"
    )


def _order_text(plan: RunPlan) -> str:
    reading = plan.data.reading
    masked = ", intra-document masking" if plan.config.intra_document_masking else ""
    if len(reading.stages) > 1:
        return f"{len(reading.stages)} stages{masked}"
    return (f"mixed: {stage_title(reading, 0)}" if reading.stages else f"{reading.kind} order") + masked
