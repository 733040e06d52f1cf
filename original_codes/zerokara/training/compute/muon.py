"""Muon: momentum orthogonalized by Newton-Schulz (Jordan et al., 2024, kellerjordan.github.io/posts/muon), with the
update scaled as in "Muon is Scalable for LLM Training" (Liu et al., 2025, arXiv 2502.16982, section 2.2):

    M ← μ·M + G          O = orthogonal(G + μ·M)          W ← W − lr·(0.2·√max(R, C)·O + weight_decay·W)

With this scale an update has the root mean square of one of AdamW's, so that AdamW's learning rate and weight decay
serve both.

Why not an existing one: torch.optim.Muon (2.13) rounds to bf16 whatever the dtype of the weights, so that fp32 runs on
one process and on two diverge after a few steps, and does not split `linear_qkv`. DeepSpeed's (0.19.8,
runtime/zero/muon) computes the gradient norm, and clips, after the orthogonalization, scales otherwise, and is compiled
by torch.compile while the run waits.

Shape suffixes: R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration (Jordan et al.): steepest at 0, so that five rounds bring every
singular value to between 0.7 and 1.2."""
ROUNDS = 5
RMS_OF_ADAMW = 0.2
"""The usual root mean square of AdamW's updates (Liu et al., 2025)."""


class Muon(torch.optim.Optimizer):
    """Updates matrices, each whole; a parameter of three dimensions is one matrix for each expert."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        momentum: float,
        weight_decay: float,
        blocks: Mapping[Tensor, Sequence[Tensor]],
        dtype: torch.dtype,
    ):
        """`blocks` are the rows of each matrix in parameters that hold several; `dtype` is that of the products."""
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._blocks, self._dtype = blocks, dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum_RC = state["momentum_buffer"]
                momentum_RC.mul_(group["momentum"]).add_(parameter.grad)
                direction_RC = parameter.grad.add(momentum_RC, alpha=group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                blocks = self._blocks.get(parameter, ())
                directions = direction_RC.unbind() if parameter.dim() == 3 else (direction_RC,)
                matrices = parameter.unbind() if parameter.dim() == 3 else (parameter,)
                for matrix_RC, towards_RC in zip(matrices, directions, strict=True):
                    self._move(matrix_RC, towards_RC, blocks, group["lr"])

    def _move(self, matrix_RC: Tensor, direction_RC: Tensor, blocks: Sequence[Tensor], lr: float) -> None:
        if not blocks:
            matrix_RC.add_(self._scaled(direction_RC), alpha=-lr)
        for rows in blocks:
            matrix_RC.index_add_(0, rows, self._scaled(direction_RC[rows]), alpha=-lr)

    def _scaled(self, matrix_RC: Tensor) -> Tensor:
        scale = RMS_OF_ADAMW * math.sqrt(max(matrix_RC.shape))
        return orthogonal(matrix_RC, self._dtype).to(matrix_RC.dtype).mul_(scale)


def orthogonal(matrix_RC: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest matrix with orthogonal rows or columns, roughly: singular values between 0.7 and 1.2, in `dtype`."""
    a, b, c = COEFFICIENTS
    wide = matrix_RC if matrix_RC.size(0) <= matrix_RC.size(1) else matrix_RC.T
    # Divided by its Frobenius norm, its largest singular value is at most 1, where the iteration converges.
    wide = (wide / wide.norm().clamp(min=1e-7)).to(dtype)
    for _ in range(ROUNDS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix_RC.size(0) <= matrix_RC.size(1) else wide.T
