"""On a GPU: in a training step the host waits for the device once, in the one read of the step's numbers.

torch raises an error at every other wait that it knows of (`torch.cuda.set_sync_debug_mode`): numbers that are read,
copies from and to memory that is not pinned, `nonzero` and its kind. Waits for a stream or the whole device, which only
DeepSpeed asks for, are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from engines import engine_of
from gpu_device import DEVICE, PRECISION, REHEARSED

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import compilation, loss
from zerokara.model.builder import build
from zerokara.model.experts import Routing
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import engine, zero
from zerokara.training.guards import StepGuard
from zerokara.training.loop import train_step
from zerokara.training.processes.joining import Processes
from zerokara.training.run import StepBatches

pytestmark = pytest.mark.gpu

VOCABULARY = 1000
SYNCHRONIZE = "synchronize"
COMMON = {
    "num_layers": 2, "hidden_size": 64, "num_attn_heads": 4, "seq_len": 64, "global_batch_size": 4,
    "micro_batch_size": 2, "precision": PRECISION, "optimizer": "adamw", "lr": 0.001,
    "muon_momentum": 0.95, "weight_decay": 0.1,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    **{name: {"architecture": name} for name in ("llama", "qwen3", "gpt2", "t5", "mixtral", "qwen3_moe", "switch")},
    "t5_moe": {"architecture": "t5_moe", "moe_layers": "[1]", "expert_capacity_factor": 1.0},
    **{f"adamw, ZeRO {stage}": {"zero_stage": stage} for stage in range(4)},
    **{f"{name}, ZeRO {stage}": {"optimizer": name, "zero_stage": stage}
       for name in ("adafactor", "muon") for stage in (0, 1)},
    "mixtral, ZeRO 2": {"architecture": "mixtral", "zero_stage": 2},
    "mixtral, packed examples": {
        "architecture": "mixtral", "expert_capacity_factor": 1.0, "intra_document_masking": "true"},
    "intra-document masking": {"intra_document_masking": "true"},
    "activation checkpointing": {"activation_checkpointing": "full"},
}  # fmt: skip


@contextmanager
def waits_refused() -> Iterator[Counter[str]]:
    """Make every wait an error but those of `engine.read_once` and DeepSpeed's; yields a count of these, by kind.

    A read counts by the device of its numbers.
    """
    waits: Counter[str] = Counter()

    def counted(wait: Callable[..., Any], kind: Callable[..., str]) -> Callable[..., Any]:
        def waiting(*arguments: Any) -> Any:
            waits[kind(*arguments)] += 1
            set_mode("default")
            try:
                return wait(*arguments)
            finally:
                set_mode("error")

        return waiting

    read_once = counted(engine.read_once, lambda norm, _: norm.device.type)
    with (
        mock.patch.object(engine, "read_once", read_once),
        mock.patch.object(zero, "read_once", read_once),
        mock.patch.object(torch.cuda, "synchronize", counted(torch.cuda.synchronize, lambda *_: SYNCHRONIZE)),
        mock.patch.object(
            torch.cuda.Stream, "synchronize", counted(torch.cuda.Stream.synchronize, lambda _: SYNCHRONIZE)
        ),
    ):
        set_mode("error")
        try:
            yield waits
        finally:
            set_mode("default")


def set_mode(mode: str) -> None:
    if not REHEARSED:
        torch.cuda.set_sync_debug_mode(mode)


def batches(config: PretrainConfig, generator: torch.Generator) -> StepBatches:
    """Random ids of a step, in pinned memory as the loader's."""
    made = []
    for _ in range(config.global_batch_size // config.micro_batch):
        inputs, labels = (
            torch.randint(4, VOCABULARY, (config.micro_batch, length), generator=generator)
            for length in (config.lengths.input, config.lengths.target)
        )
        batch = [inputs, labels, torch.ones(labels.shape)]
        batch += [labels] if config.traits.is_encoder_decoder else []
        if config.intra_document_masking:
            batch += packed_arguments(inputs) if config.traits.moe_every else [torch.zeros_like(inputs)]
        made.append(batch if REHEARSED else [each.pin_memory() for each in batch])
    return StepBatches(made, float(sum(batch[1].numel() for batch in made)))


def packed_arguments(inputs: torch.Tensor) -> list[torch.Tensor]:
    """Segments, their offsets and the number of examples: one example in each row, and padding in its last quarter."""
    num, length = inputs.shape
    segments = torch.zeros_like(inputs)
    segments[:, -length // 4 :] = 1
    offsets = torch.arange(num)[:, None] * length + torch.tensor([0, length - length // 4])
    return [segments, torch.cat([offsets.flatten(), torch.tensor([num * length])]).int(), torch.ones_like(inputs[:, 0])]


def check_third_step(settings: dict[str, Any], compiles: bool = False) -> None:
    """Two steps may wait (kernels are chosen, memory is taken); the third is watched, with its edge."""
    config = load(PretrainConfig, "/dev/null", [f"{key}={value}" for key, value in (COMMON | settings).items()])
    model = build(ModelShape.from_config(config, VOCABULARY), seed=1, routing=Routing.from_config(config))
    trained = engine_of(model, config, chosen_for=2)
    if compiles:
        assert compilation.start(model, config.micro_batch, config.intra_document_masking, log=print)
    guard = StepGuard(0.0, 0)
    processes, generator = Processes(DEVICE, 0, host_group()), torch.Generator().manual_seed(2)

    def step(number: int) -> None:
        loader = iter([batches(config, generator)])
        train_step(trained, processes, loader, number, 1e-3, guard, lambda: False)

    step(1)
    step(2)
    with waits_refused() as waits:
        step(3)
    # DeepSpeed (0.19.8) waits at the end of the backward pass: stage 2 where it overlaps (stage_1_and_2.py,
    # independent_gradient_partition_epilogue), stage 3 always (stage3.py, the function of the same name).
    allowed = config.global_batch_size // config.micro_batch if config.zero_stage >= 2 else 0
    assert waits.pop(SYNCHRONIZE, 0) <= allowed
    assert waits == Counter([DEVICE.type])


def host_group() -> Any:
    """A run's group of the host's memory: `joining.join`."""
    return None if REHEARSED else torch.distributed.new_group(backend="gloo")


@pytest.mark.parametrize("name", RUNS)
def test_the_host_waits_once_a_step(name: str) -> None:
    check_third_step(RUNS[name])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "t5", "mixtral"])
def test_the_host_waits_once_a_compiled_step(architecture: str) -> None:
    try:
        check_third_step({"architecture": architecture}, compiles=True)
    finally:
        loss.fused_softmax = None
