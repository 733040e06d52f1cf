"""Checkpoints of a few bytes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zerokara.checkpoint import TrainingState, store


def saved(run_dir: Path, step: int, valid_loss: float | None = None, **more: Any) -> Path:
    """Save a checkpoint of `step`, validated with `valid_loss`, `more` in its state; gives its folder."""
    state = replace(state_of(step, valid_loss), **more)
    weights = {"a.weight": torch.full((2, 3), float(step))}
    moments = {"a.weight.exp_avg": torch.zeros(2, 3), "a.weight.exp_avg_sq": torch.ones(2, 3)}
    return store.save(run_dir, state, weights, moments)


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def state_of(step: int, valid_loss: float | None = None) -> TrainingState:
    facts = {"loss": 2.0} if valid_loss is None else {"valid_loss": valid_loss, "valid_step": step}
    return TrainingState(
        step=step, samples=step * 8, tokens=step * 256, seconds=1.5, shape={"num_layers": 1}, tokenizer_sha256="t",
        data_sha256="d", precision="bf16", facts=facts, skipped_steps=3, recent_losses=(2.5, 2.25),
    )  # fmt: skip
