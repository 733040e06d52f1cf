"""Compiled layers train as eager ones, in every family, from the first step of a start and of a resume on.

What torch.compile captures is what counts here (``aot_eager``); one run has the code that it generates. The experts
take the way that they take on a GPU, their kernel in plain operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import rounding
import torch
from configs import config_of
from engines import engine_of, join_alone
from grouped import plain_grouped_mm
from torch import Tensor

from zerokara.model import compilation, experts
from zerokara.model.builder import build
from zerokara.model.experts import AuxiliaryLoss, Routing
from zerokara.model.shapes import ModelShape
from zerokara.training.compute.engine import Engine, load_state, master_weights, optimizer_state

FAMILIES = ["qwen3", "gpt2", "t5", "qwen3_moe", "t5_moe"]
MICRO_BATCHES, MICRO_BATCH, VOCAB = 2, 2, 300


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    join_alone()
    monkeypatch.setenv(compilation.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(experts, "has_kernel", lambda _: True)
    monkeypatch.setattr(experts, "grouped_mm", plain_grouped_mm)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()


def engine_for(family: str, compiled: bool) -> tuple[Engine, ModelShape]:
    layers = {"moe_layers": [1]} if family == "t5_moe" else {}
    config = config_of(
        **layers, architecture=family, num_layers=2, seq_len=24, global_batch_size=MICRO_BATCHES * MICRO_BATCH,
        micro_batch_size=MICRO_BATCH, router_aux_loss_coef=0.3, router_z_loss_coef=0.2, compile="on",
    )  # fmt: skip
    shape = ModelShape.from_config(config, VOCAB)
    model = build(shape, seed=2, routing=Routing.from_config(config))
    engine = engine_of(model, config)
    if compiled:
        assert compilation.start(model, MICRO_BATCH, intra_document_masking=False, log=lambda _: None)
    return engine, shape


def train(engine: Engine, shape: ModelShape, num_steps: int, seed: int) -> list[float]:
    """Mean nats of each step, and the gradient norm: the norm alone tells of a gradient that no loss is made of."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    tokens = MICRO_BATCHES * MICRO_BATCH * shape.target_len
    for _ in range(num_steps):
        nats = 0.0
        for _ in range(MICRO_BATCHES):
            ids = torch.randint(0, VOCAB, (MICRO_BATCH, shape.seq_len), generator=generator)
            labels = torch.randint(0, VOCAB, (MICRO_BATCH, shape.target_len), generator=generator)
            batch = [ids, labels, torch.ones(labels.shape)]
            batch += [labels.roll(1, dims=1)] if shape.traits.is_encoder_decoder else []
            nats += engine.accumulate(batch, float(tokens), MICRO_BATCHES * MICRO_BATCH).item()
        found += [nats / tokens, engine.update(1e-2)]
    return found


def state(engine: Engine) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    weights, moments = (
        {name: tensor.clone() for name, tensor in part(engine)} for part in (master_weights, optimizer_state)
    )
    return weights, moments


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_train_as_eager_ones(family: str) -> None:
    eager, shape = engine_for(family, compiled=False)
    compiled, _ = engine_for(family, compiled=True)
    expected = train(eager, shape, 2, seed=3)
    rounding.assert_same_curve(train(compiled, shape, 2, seed=3), expected, quantity="grad_norm")
    weights, moments = state(eager)
    rounding.assert_same_weights(state(compiled)[0], weights, at_step=2)
    resumed, _ = engine_for(family, compiled=True)
    for engine in (eager, resumed):
        load_state(engine, weights.items(), moments, eager.num_updates)
    expected = train(eager, shape, 1, seed=4)
    rounding.assert_same_curve(train(resumed, shape, 1, seed=4), expected, quantity="grad_norm")


def test_generated_code_trains_as_eager_layers(train_runs: Callable) -> None:
    short = {"zero_stage": 1, "train_tokens": 10 * 8 * 32}
    runs = train_runs({"eager": short, "compiled": {**short, "compile": "on"}})
    eager, compiled = runs["eager"].losses, runs["compiled"].losses
    assert len(eager) == 10 and eager[0] - eager[-1] > 0.3
    rounding.assert_same_curve(compiled, eager)
    assert compiled != eager  # or nothing was compiled


def test_auxiliary_losses_without_their_weight_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin."""
    expected = train(*engine_for("mixtral", compiled=False), 1, seed=3)
    monkeypatch.setattr(AuxiliaryLoss, "set_weight", lambda *_: None)
    found = train(*engine_for("mixtral", compiled=False), 1, seed=3)
    assert rounding.times_tolerance(found, expected, quantity="grad_norm") > rounding.BROKEN
