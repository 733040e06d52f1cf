"""Adafactor without a first moment (Shazeer and Stern, 2018, algorithm 6, with a learning rate from outside).

Why not an existing one: those of transformers (5.23) and torch (2.13) read the root mean square of each tensor, so that
the host waits for the device once or twice a tensor. Here all of it stays on the device.

For a gradient G of weights W, with β = 1 − t^−0.8 at update t:

    V ← β·V + (1 − β)·(G² + ε1), of a matrix only the means of its rows and of its columns
    U = G / √V        U ← U / max(1, RMS(U) / d)        W ← W − α·U − α·weight_decay·W, α = lr · max(ε2, RMS(W))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

DECAY, CLIPPING, EPSILONS = -0.8, 1.0, (1e-30, 1e-3)
"""The exponent of t, d, and (ε1, ε2): the paper's."""
CHUNK = 2**25
"""Numbers of the tensors that are updated together: as many are held once more meanwhile."""


class Adafactor(torch.optim.Optimizer):
    """Updates fp32 tensors in place. Its state is `exp_avg_sq_row` and `exp_avg_sq_col`, of a vector `exp_avg_sq`."""

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float):
        """Each group has its `weight_decay`."""
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        assert closure is None
        for group in self.param_groups:
            for parameters in _chunks([each for each in group["params"] if each.grad is not None]):
                directions = [self._direction(each) for each in parameters]
                clips = (_root_mean_squares(directions) / CLIPPING).clamp(min=1.0)
                rates = group["lr"] * _root_mean_squares(parameters).clamp(min=EPSILONS[1])
                torch._foreach_mul_(directions, list((rates / clips).unbind()))
                if group["weight_decay"]:
                    torch._foreach_mul_(parameters, list((1 - group["weight_decay"] * rates).unbind()))
                torch._foreach_sub_(parameters, directions)

    def _direction(self, parameter: Tensor) -> Tensor:
        """The gradient over the root of the second moment, which is updated."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        state["step"] += 1
        weight = math.pow(state["step"], DECAY)  # 1 − β
        squares = gradient.square().add_(EPSILONS[0])
        if parameter.dim() < 2:
            return state["exp_avg_sq"].lerp_(squares, weight).rsqrt().mul_(gradient)
        rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
        rows.lerp_(squares.mean(dim=-1), weight)
        columns.lerp_(squares.mean(dim=-2), weight)
        by_row = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        return torch.mul(by_row, columns.unsqueeze(-2).rsqrt(), out=squares).mul_(gradient)


def _root_mean_squares(tensors: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(tensors)
    return torch.stack(torch._foreach_div(norms, [math.sqrt(each.numel()) for each in tensors]))


def _chunks(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    for parameter in parameters:
        if chunk and sum(each.numel() for each in chunk) + parameter.numel() > CHUNK:
            yield chunk
            chunk = []
        chunk.append(parameter)
    if chunk:
        yield chunk
