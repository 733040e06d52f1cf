"""Where layers cannot be compiled, functions are: they train as eager ones, and training calls what was compiled."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rounding
import torch
import torch.distributed
from configs import RECIPE
from engines import open_with_weights
from forked import answers_of
from grouped import plain_grouped_mm
from torch._dynamo.utils import counters

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import compilation, experts, parallel
from zerokara.model.builder import build
from zerokara.model.experts import Routing
from zerokara.model.shapes import ModelShape

COMMON = RECIPE | {
    "num_layers": 2, "hidden_size": 64, "num_attn_heads": 4, "seq_len": 24, "micro_batch_size": 2,
    "global_batch_size": 4, "precision": "fp32",
}  # fmt: skip
ZERO_3 = {"zero_stage": 3}
SHARED = {"zero_stage": 0, "tensor_parallel_size": 2, "global_batch_size": 2}
RUNS: dict[str, dict[str, Any]] = {
    "llama, ZeRO 3": {**ZERO_3, "num_kv_heads": 2},
    "gpt2, ZeRO 3, checkpointing": {**ZERO_3, "architecture": "gpt2", "activation_checkpointing": "full"},
    "qwen3, tensor parallel": {**SHARED, "architecture": "qwen3"},
}
ROTATED = ("llama", "qwen3")
PARALLEL = {"largest_logits", "sums_of_exponentials", "exponentials_times_mask"}


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
    """Train eagerly, then compiled: nats of each step, calls of each compiled function, and captured graphs.

    No code is generated for them (``aot_eager``).
    """
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    experts.has_kernel, experts.grouped_mm = lambda hidden: True, plain_grouped_mm  # as on a GPU
    eager, compiled = train(config, compiled=False), train(config, compiled=True)
    return {
        "rank": torch.distributed.get_rank(), "eager": eager["nats"], "compiled": compiled["nats"],
        "calls": compiled["calls"], "log": compiled["log"], "captured": counters["stats"]["unique_graphs"],
    }  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, python_path: None, warm_server: Path | None) -> dict[str, Any]:
    jobs = {name: COMMON | settings for name, settings in RUNS.items()}
    found = answers_of(compare, jobs, tmp_path_factory.mktemp("functions"), warm_server)
    return {name: min(ranks, key=lambda answer: answer["rank"]) for name, ranks in found.items()}


@pytest.mark.parametrize("name", RUNS)
def test_compiled_functions_train_as_eager_ones(seen: dict[str, Any], name: str) -> None:
    rounding.assert_same_curve(seen[name]["compiled"], seen[name]["eager"])
    assert seen[name]["compiled"][0] > seen[name]["compiled"][-1], "they train"


@pytest.mark.parametrize("name", RUNS)
def test_the_training_calls_what_was_compiled(seen: dict[str, Any], name: str) -> None:
    calls, settings = seen[name]["calls"], RUNS[name]
    softmax = PARALLEL if "tensor_parallel_size" in settings else {"softmax_times_mask"}
    rotates = {"apply_rotary_pos_emb_bshd"} if name.split(",")[0] in ROTATED else set()
    assert set(calls) == softmax | rotates | {"plain_activate"}, seen[name]["log"]
    times = 2 if "checkpointing" in name else 1  # computed again
    assert calls["plain_activate"] == 3 * 2 * times, "steps, layers"
    # Those of the loss once; the others for training and evaluation; rotation of queries and of fewer keys.
    sizes = 1 + len(rotates) * (2 if "num_kv_heads" in settings else 1)
    assert seen[name]["captured"] == len(softmax) + 2 * sizes
