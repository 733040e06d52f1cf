"""Kinds of training steps on random batches, for tests that watch what a step asks of its device."""

from collections.abc import Callable
from typing import Any

import torch

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.samples.objective import Causal
from zerokara.training.compute.engine import Engine
from zerokara.training.guards import StepGuard
from zerokara.training.loop import train_step
from zerokara.training.processes.joining import Processes
from zerokara.training.run import StepBatches, as_tensors

VOCABULARY, END = 1000, 2
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"architecture": name} for name in ("qwen3", "gpt2", "t5", "mixtral", "qwen3_moe", "switch")},
    "t5_moe": {"architecture": "t5_moe", "moe_layers": "[1]", "expert_capacity_factor": 1.0},
    **{f"ZeRO {stage}": {"zero_stage": stage} for stage in (1, 2, 3)},
    **{f"{name}, ZeRO {stage}": {"optimizer": name, "zero_stage": stage}
       for name in ("adafactor", "muon") for stage in (1, 2, 3)},
    "mixtral, ZeRO 2": {"architecture": "mixtral", "zero_stage": 2},
    "mixtral, packed examples": {
        "architecture": "mixtral", "expert_capacity_factor": 1.0, "intra_document_masking": "true"},
    "masking": {"intra_document_masking": "true"},
    "masking, checkpointing": {
        "intra_document_masking": "true", "zero_stage": 3, "activation_checkpointing": "full", "dropout": 0.1},
}  # fmt: skip


def stepper(
    config: PretrainConfig, engine: Engine, processes: Processes, seed: int, pins: bool = False
) -> Callable[[int], None]:
    """Return a function that trains the step of a number, on batches pinned as the loader's if `pins`."""
    generator, guard = torch.Generator().manual_seed(seed), StepGuard(config)

    def step(number: int) -> None:
        loader = iter([batches_of(config, generator, parallel.data_size(), pins)])
        train_step(engine, processes, loader, number, 1e-3, guard, lambda: False)

    return step


def batches_of(config: PretrainConfig, generator: torch.Generator, ranks: int, pins: bool) -> StepBatches:
    micro_batches = []
    for index in range(config.global_batch_size // config.micro_batch // ranks):
        inputs, labels = (
            torch.randint(4, VOCABULARY, (config.micro_batch, length), generator=generator)
            for length in (config.lengths.input, config.lengths.target)
        )
        batch = [inputs, labels, torch.ones(labels.shape), torch.arange(config.micro_batch)]
        if config.intra_document_masking:
            ids = torch.cat([inputs, labels[:, -1:]], dim=1).numpy()
            ids[:, 3 :: 2 + index] = END  # another number of documents in each micro batch
            batch = as_tensors(Causal(config.lengths, END)(ids, ids[:, 0]))
            if config.traits.moe_every:  # as of packed examples, the fourth segment padding
                batch.append(torch.full_like(batch[0][:, 0], 3))
        batch += [labels] if config.traits.is_encoder_decoder else []
        micro_batches.append([each.pin_memory() for each in batch] if pins else batch)
    return StepBatches(micro_batches, float(sum(batch[1].numel() for batch in micro_batches)), 0.0)
