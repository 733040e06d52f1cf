"""Auxiliary losses: a layer adds the gradient of a loss of its own, wherever in the model it stands.

An auxiliary loss must be scaled as the training loss is, but that scale (one over the tokens of the global batch, and
what DeepSpeed multiplies) is unknown before the backward pass. So it is observed where the backward pass enters the
model (`observe`), before it reaches any layer, and applied where it leaves a layer (`attach`). The value of the
training loss does not change. This holds under activation checkpointing as well.

megatron-core's MoEAuxLossAutoScaler (transformer/moe/moe_utils.py, 0.16.1) does the same with one global scale, which
the training loop has to know beforehand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AuxiliaryLoss:
    """The scale of auxiliary losses, shared by the layers of one model."""

    scale: Tensor | float = 0.0
    """The gradient of one sequence's auxiliary loss; set as each backward pass begins."""

    def observe(self, nats: Tensor, tokens: int) -> Tensor:
        """Return the summed nats unchanged; to be called last. Each sequence predicts `tokens`.

        Then, beside the mean of the nats over the tokens, stands the mean of the attached losses over the sequences.
        """
        observed: Tensor = _Observe.apply(nats, tokens, self)
        return observed

    def attach(self, activations: Tensor, loss: Tensor) -> Tensor:
        """Return the activations unchanged; their backward pass adds the gradient of `loss`, a sum over sequences."""
        attached: Tensor = _Attach.apply(activations, loss, self)
        return attached


class _Observe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, nats: Tensor, tokens: int, auxiliary: AuxiliaryLoss) -> Tensor:
        ctx.tokens, ctx.auxiliary = tokens, auxiliary
        return nats.view_as(nats)

    @staticmethod
    def backward(ctx: Any, grad_nats: Tensor) -> tuple[Tensor, None, None]:
        ctx.auxiliary.scale = grad_nats * ctx.tokens
        return grad_nats, None, None


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activations: Tensor, loss: Tensor, auxiliary: AuxiliaryLoss) -> Tensor:
        ctx.auxiliary, ctx.loss = auxiliary, loss
        return activations.view_as(activations)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.ones_like(ctx.loss) * ctx.auxiliary.scale, None
