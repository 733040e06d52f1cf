"""Trains two processes eagerly and with compiled functions, under ZeRO 3 and under tensor parallelism.

Reads a JSON file: a list of settings; prints a JSON list of objects: `eager` and `compiled`, the nats of each step of
the first process; `calls`, how often the training called each compiled function; `errors`, those that did not compile;
and `captured`, how many graphs torch's compiler captured. No code is generated for them (``aot_eager``).
"""

import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # before the fork
import torch.distributed
from engines import open_with_weights
from forked import answers
from grouped import plain_grouped_mm
from torch._dynamo.utils import counters

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import compilation, experts, parallel
from zerokara.model.builder import build
from zerokara.model.experts import Routing
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import zero  # noqa: F401  # DeepSpeed, once for all processes

VOCABULARY, STEPS = 301, 3
"""The last rank has rows of the vocabulary that are padding."""


def train(config: PretrainConfig, compiled: bool) -> dict[str, Any]:
    """Train on random ids; nothing is compiled after the start."""
    shape = ModelShape.from_config(config, VOCABULARY)
    model = build(
        shape, seed=1, activation_checkpointing=config.activation_checkpointing, routing=Routing.from_config(config)
    )
    engine = open_with_weights(model, config, {}, torch.device("cpu"))
    calls: dict[str, int] = {}
    errors: list[str] = []
    if compiled:
        batch = config.micro_batch, config.intra_document_masking, errors.append
        compilation.start(model, *batch, whole_layers=False)
        for fused in compilation.fused_functions():
            fused._compiled = counted(fused._compiled, fused.function.__name__.strip("_"), calls)
        torch.compiler.set_stance("fail_on_recompile")
    nats = []
    for _ in range(STEPS):
        generator = torch.Generator().manual_seed(parallel.data_rank())  # the same batch in each step
        ids = torch.randint(0, VOCABULARY, (config.micro_batch, shape.seq_len), generator=generator)
        labels = torch.randint(0, VOCABULARY, (config.micro_batch, shape.target_len), generator=generator)
        batch = [ids, labels, torch.ones(labels.shape)]
        batch += [labels.roll(1, dims=1)] if shape.traits.is_encoder_decoder else []
        nats.append(engine.accumulate(batch, 1000.0, len(ids)).item())
        engine.update(1e-3)
    return {"nats": nats, "calls": calls, "log": errors}


def counted(function: Any, name: str, calls: dict[str, int]) -> Any:
    """The function, its calls counted."""

    def counting(*arguments: Any, **named: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        return function(*arguments, **named)

    return counting


def compare(config: PretrainConfig) -> dict[str, Any]:
    """Train eagerly, then compiled."""
    warnings.simplefilter("ignore")
    experts.has_kernel, experts.grouped_mm = lambda hidden: True, plain_grouped_mm  # as on a GPU
    eager, compiled = train(config, compiled=False), train(config, compiled=True)
    return {
        "rank": torch.distributed.get_rank(), "eager": eager["nats"], "compiled": compiled["nats"],
        "calls": compiled["calls"], "log": compiled["log"], "captured": counters["stats"]["unique_graphs"],
    }  # fmt: skip


if __name__ == "__main__":
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    found = []
    for settings in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        config = load(PretrainConfig, "/dev/null", [f"{key}={value}" for key, value in settings.items()])
        ranks = answers(2, config.tensor_parallel_size, partial(compare, config))
        found.append(min(ranks, key=lambda answer: answer["rank"]))
    print(json.dumps(found))
