"""A loss beside the loss: a layer adds to the gradient what it wishes for itself, wherever in the model it stands.

What a layer adds must weigh as much as training's own loss does, whose factor (one over the tokens of the global batch,
and what DeepSpeed multiplies) nobody knows before the backward pass. So that factor is read where the backward pass
enters the model (`entered`), before it reaches any layer, and used where it leaves a layer (`added`). The value of the
loss stays training's own. It holds for a layer that is computed a second time as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Auxiliary:
    """What the layers of one model share."""

    gradient: Tensor | float = 0.0
    """What one sequence's auxiliary loss weighs: set by each backward pass as it begins."""

    def entered(self, nats: Tensor, tokens: int) -> Tensor:
        """The summed nats, unchanged; call it last. `tokens` are predicted of each sequence.

        Then the mean of the nats over the tokens has the mean of the added losses over the sequences beside it.
        """
        entered: Tensor = _Entered.apply(nats, tokens, self)
        return entered

    def added(self, activations: Tensor, loss: Tensor) -> Tensor:
        """The activations, unchanged; their backward pass also brings the gradient of `loss`, a sum over sequences."""
        added: Tensor = _Added.apply(activations, loss, self)
        return added


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, nats: Tensor, tokens: int, shared: Auxiliary) -> Tensor:
        ctx.tokens, ctx.shared = tokens, shared
        return nats.view_as(nats)

    @staticmethod
    def backward(ctx: Any, grad_nats: Tensor) -> tuple[Tensor, None, None]:
        ctx.shared.gradient = grad_nats * ctx.tokens
        return grad_nats, None, None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activations: Tensor, loss: Tensor, shared: Auxiliary) -> Tensor:
        ctx.shared, ctx.like = shared, loss
        return activations.view_as(activations)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.ones_like(ctx.like) * ctx.shared.gradient, None
