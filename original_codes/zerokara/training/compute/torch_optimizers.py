"""Torch optimizers for a model's parameters, as `optimizers` assigns them: made, loaded with a state, and driven."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.model.parameters import row_blocks
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import optimizers
from zerokara.training.compute.adafactor import Adafactor
from zerokara.training.compute.muon import Muon
from zerokara.training.compute.optimizers import Algorithm


def build(
    config: TrainingSettings, tensors: Mapping[str, Tensor], shape: ModelShape
) -> dict[Algorithm, torch.optim.Optimizer]:
    """Torch optimizers for fp32 `tensors` (some or all parameters, by name), one for each algorithm in use."""
    parameters = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    groups: dict[Algorithm, list[dict[str, Any]]] = {}
    for group in optimizers.parameter_groups(config, parameters):
        entry = {"params": [tensors[name] for name in group.names], "weight_decay": group.weight_decay}
        groups.setdefault(group.algorithm, []).append({**entry, "lr_scale": group.lr_scale})
    return {algorithm: _optimizer(algorithm, config, each, tensors, shape) for algorithm, each in groups.items()}


def make_state(optimizer: str, made: Mapping[Algorithm, torch.optim.Optimizer], tensors: Mapping[str, Tensor]) -> None:
    """Make the state of `tensors`, all zeros. Optimizers do it in their first update: too late to load a checkpoint."""
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        algorithm = optimizers.algorithm_of(optimizer, name, shape)
        state: dict[str, Any] = {
            key: torch.zeros(of_key, dtype=torch.float32, device=tensor.device)
            for key, of_key in optimizers.state_shapes(optimizer, name, shape).items()
        }
        if algorithm == "adamw":
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        elif algorithm == "adafactor":
            state["step"] = 0
        made[algorithm].state[tensor] = state


def set_learning_rate(groups: Iterable[dict[str, Any]], learning_rate: float) -> None:
    """Set the learning rate of torch's parameter groups from that of the schedule."""
    for group in groups:
        group["lr"] = learning_rate * group["lr_scale"]


def set_count(made: Mapping[Algorithm, torch.optim.Optimizer], num_updates: int) -> None:
    """Set the number of updates that the optimizers have made, which the bias correction of AdamW needs."""
    for one in made.values():
        for state in one.state.values():
            if isinstance(state.get("step"), int):
                state["step"] = num_updates
            elif "step" in state:
                state["step"].fill_(num_updates)


def _optimizer(
    algorithm: Algorithm,
    config: TrainingSettings,
    groups: list[dict[str, Any]],
    tensors: Mapping[str, Tensor],
    shape: ModelShape,
) -> torch.optim.Optimizer:
    if algorithm == "adamw":
        betas = config.adam_beta1, config.adam_beta2
        return torch.optim.AdamW(groups, lr=config.peak_lr, betas=betas, eps=config.adam_epsilon, fused=True)
    if algorithm == "adafactor":
        return Adafactor(groups, config.peak_lr)
    blocks = {
        tensor: [torch.from_numpy(rows).to(tensor.device) for rows in row_blocks(name, shape)]
        for name, tensor in tensors.items()
    }
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    return Muon(groups, config.peak_lr, config.momentum, config.matrix_decay, blocks, dtype)
