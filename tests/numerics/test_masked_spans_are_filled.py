"""A T5 soon fills masked spans from the text around them, because its relative position bias learns fast."""

from __future__ import annotations

import numpy as np
import torch
from engines import engine_of, join_alone
from torch import Tensor

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model.builder import build
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import corrupt, noise_mask

SYMBOLS, FIRST, END, START = 24, 4, 2, 3
SENTINELS = np.arange(FIRST + SYMBOLS, FIRST + SYMBOLS + 12)
STEPS, BATCH = 180, 32
SETTINGS = [
    "architecture=t5", "num_kv_heads=auto", "num_layers=2", "hidden_size=48", "num_attn_heads=4", "head_dim=12",
    "ffn_hidden_size=96", "seq_len=24", "noise_density=0.2", "mean_span_length=1", "optimizer=muon", "lr=0.005",
    "muon_momentum=0.95", "weight_decay=0.1",
    f"global_batch_size={BATCH}", f"micro_batch_size={BATCH}", "zero_stage=0", "precision=fp32",
]  # fmt: skip


def samples(settings: PretrainConfig, begin: int, number: int) -> tuple[Tensor, list[Tensor]]:
    """Texts of pairs: a symbol, drawn, and the one that always follows it. A masked span follows from its neighbour."""
    partner = np.random.default_rng(7).permutation(SYMBOLS)
    text = np.random.default_rng(begin).integers(0, SYMBOLS, (number, settings.lengths.raw))
    text[:, 1::2] = partner[text[:, : text.shape[1] // 2 * 2 : 2]]
    numbers = np.arange(begin, begin + number)
    read, written = corrupt(text + FIRST, noise_mask(settings.lengths, 1, numbers), SENTINELS, END)
    labels = torch.tensor(written)
    return torch.tensor(read), [labels, torch.ones(labels.shape), torch.nn.functional.pad(labels, (1, -1), value=START)]


def loss_with_another_text(*overrides: str) -> float:
    """Train; return the nats per token that the loss grows by if the encoder reads the text of another sample."""
    join_alone()
    settings = load(PretrainConfig, "/dev/null", [*SETTINGS, *overrides])
    shape = ModelShape.from_config(settings, int(SENTINELS[-1]) + 1)
    model = build(shape, seed=2)
    engine = engine_of(model, settings)
    for step in range(STEPS):
        read, others = samples(settings, step * BATCH, BATCH)
        engine.accumulate([read, *others], float(others[0].numel()), BATCH)
        engine.update(settings.lr * min(1, (step + 1) / 20))
    read, others = samples(settings, STEPS * BATCH, 256)
    with torch.inference_mode():
        right, wrong = (model(text, *others).item() for text in (read, read.roll(1, 0)))
    return (wrong - right) / others[0].numel()


def test_the_encoder_is_attended_to() -> None:
    fast, slow = loss_with_another_text(), loss_with_another_text("relative_attention_lr_multiplier=1")
    assert fast > 1 and fast > 2 * slow, f"{fast:.2f} nats, {slow:.2f} where the bias learns no faster"
