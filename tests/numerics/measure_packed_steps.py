"""Trains a few steps on packed examples, each kind of run in fresh processes.

Reads a JSON file: a list of jobs {"folder": of the token files, "processes": …, "own_tokens": whether a process divides
by its own learned tokens alone, which is wrong, settings …}; prints a JSON list of objects: `losses` and `grad_norms`
by step.
"""

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # which torch.optim and DeepSpeed load when they are first used
import torch.distributed
from engines import open_with_weights
from forked import answers

from zerokara.config.data import packed
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.builder import build
from zerokara.model.experts import Routing
from zerokara.model.shapes import ModelShape
from zerokara.samples.batches import Batches, BatchLayout
from zerokara.samples.packed_examples import ExampleData, Pairs
from zerokara.training.compute import zero  # noqa: F401  # DeepSpeed, once for all processes
from zerokara.training.compute.updater import load_template
from zerokara.training.guards import StepGuard
from zerokara.training.loop import train_step
from zerokara.training.processes.joining import Processes
from zerokara.training.run import load_batches

VOCABULARY, PAD, NUM_STEPS = 300, 0, 4


class OwnTokens(Processes):
    """The broken twin: the count of another process does not matter."""

    def sum(self, values: Sequence[float]) -> list[float]:
        return [value * torch.distributed.get_world_size() for value in values]


def train(config: PretrainConfig, folder: Path, own_tokens: bool) -> dict[str, Any]:
    """Train on the examples in `folder`."""
    warnings.simplefilter("ignore")
    both = config.traits.is_encoder_decoder
    lengths = packed(32, 24, True) if both else packed(32, 32, False)
    sizes = {"input_len": lengths.input, "target_len": lengths.target, "raw_len": lengths.raw}
    shape = replace(ModelShape.from_config(config, VOCABULARY), **sizes)
    model = build(shape, seed=1, routing=Routing.from_config(config))
    template = load_template(config.deepspeed_template)
    engine = open_with_weights(model, config, template, torch.device("cpu"))
    data = ExampleData(folder / ("pairs" if both else "conversations"), lengths, both, PAD, seed=3)
    layout = BatchLayout(config.global_batch_size, config.micro_batch, parallel.data_size())
    objective = Pairs(lengths, PAD if both else None)
    batches = Batches(data.tokens(), data.order(), layout, objective, parallel.data_rank())
    guard = StepGuard(config.spike_sigmas, config.max_skipped_steps)
    processes = (OwnTokens if own_tokens else Processes)(torch.device("cpu"), torch.distributed.get_rank())

    numbers = range(1, NUM_STEPS + 1)
    loader = load_batches(batches, lambda step: (step - 1) * config.global_batch_size, numbers, torch.device("cpu"))
    steps = [train_step(engine, processes, loader, number, 3e-3, guard, lambda: False) for number in numbers]
    return {"losses": [step.loss for step in steps], "grad_norms": [step.grad_norm for step in steps]}


def trained(processes: int, folder: str, own_tokens: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """What the first process to answer found; all found the same."""
    config = load(PretrainConfig, "/dev/null", [f"{key}={value}" for key, value in settings.items()])
    return answers(processes, config.tensor_parallel_size, lambda: train(config, Path(folder), own_tokens))[0]


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(
        json.dumps(
            [trained(job.pop("processes"), job.pop("folder"), job.pop("own_tokens", False), job) for job in jobs]
        )
    )
