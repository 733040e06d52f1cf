"""On a GPU: a model that was just drawn knows nothing, and learns in bf16 under every ZeRO stage."""

from __future__ import annotations

import pytest
import torch
from engines import engine_of
from gpu_device import DEVICE, PRECISION

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
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
    model = build(shape).to(DEVICE)
    ids = torch.randint(0, 1000, (4, 65))
    nats = model(ids[:, :-1].to(DEVICE), ids[:, 1:].to(DEVICE)).item()
    # log(1000) = 6.9 nats a token
    assert nats / ids[:, 1:].numel() == pytest.approx(6.9, abs=0.2)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bf16_learns_under_every_stage(zero_stage: int) -> None:
    """Stage 1 as well under DeepSpeed, which a lone process would not choose for it."""
    shape, settings = shape_and_settings(
        f"zero_stage={zero_stage}", f"precision={PRECISION}", "global_batch_size=8", "micro_batch_size=8"
    )
    engine = engine_of(build(shape), settings, chosen_for=2)
    ids = torch.randint(0, 1000, (8, 65)).to(DEVICE)
    mask = torch.ones(8, 64, device=DEVICE)
    losses = []
    for _ in range(20):
        losses.append(engine.accumulate([ids[:, :-1], ids[:, 1:], mask], 512.0, 8).item() / 512)
        engine.update(1e-3)
    assert losses[-1] < losses[0] - 0.5
