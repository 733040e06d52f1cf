"""On a GPU: a model that was just drawn knows nothing, and learns in bf16 under every ZeRO stage."""

from __future__ import annotations

import pytest
import torch
from engines import engine_of, join_alone

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.builder import build
from zerokara.model.shapes import ModelShape

pytestmark = pytest.mark.gpu


def shape_and_settings(*overrides: str) -> tuple[ModelShape, PretrainConfig]:
    common = ["num_layers=2", "hidden_size=128", "num_attn_heads=4", "num_kv_heads=2", "seq_len=64"]
    settings = load(PretrainConfig, "/dev/null", [*common, *overrides])
    return ModelShape.from_config(settings, 1000), settings


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_the_first_loss_is_that_of_guessing(architecture: str) -> None:
    heads = ("num_kv_heads=auto",) if architecture == "gpt2" else ()
    shape, _ = shape_and_settings(f"architecture={architecture}", *heads)
    parallel.start_alone()
    model = build(shape)
    ids = torch.randint(0, 1000, (4, 65))
    gpu = model.cuda()(ids[:, :-1].cuda(), ids[:, 1:].cuda()).item()
    # log(1000) = 6.9 nats a token
    assert gpu / ids[:, 1:].numel() == pytest.approx(6.9, abs=0.2)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bf16_learns_under_every_stage(zero_stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    shape, settings = shape_and_settings(
        f"zero_stage={zero_stage}", "precision=bf16", "global_batch_size=8", "micro_batch_size=8"
    )
    join_alone("cuda")
    engine = engine_of(build(shape), settings)
    ids = torch.randint(0, 1000, (8, 65)).cuda()
    mask = torch.ones(8, 64).cuda()
    losses = []
    for _ in range(20):
        losses.append(engine.accumulate([ids[:, :-1], ids[:, 1:], mask], 512.0).item() / 512)
        engine.update(1e-3)
    assert losses[-1] < losses[0] - 0.5
