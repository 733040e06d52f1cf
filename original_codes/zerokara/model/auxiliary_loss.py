"""Auxiliary losses: a layer adds the gradient of a loss of its own, wherever in the model it stands.

The sum over sequences of such a loss gets the gradient `weight`, a tensor that is set before each forward pass
(`Engine.accumulate`): it is an input of the layer as its activations are, so a compiled backward pass reads the value
of its own micro batch. The value of the training loss does not change. This holds under activation checkpointing too.

megatron-core's MoEAuxLossAutoScaler (transformer/moe/moe_utils.py, 0.16.1) reads a global scale in its backward pass
instead, which a compiler would freeze.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AuxiliaryLoss:
    """The weight of the auxiliary losses, shared by the layers of one model."""

    def __init__(self) -> None:
        """A model by itself trains no auxiliary loss: whoever trains it sets the weight."""
        self.weight = torch.zeros(())
        """The gradient of one sequence's auxiliary loss, a scalar in fp32 on the model's device."""

    def set_weight(self, weight: float, device: torch.device) -> None:
        """Set the weight for the next forward pass and its backward pass."""
        if self.weight.device != device:
            self.weight = torch.zeros((), device=device)
        self.weight.fill_(weight)

    def attach(self, activations: Tensor, loss: Tensor) -> Tensor:
        """Return the activations unchanged; their backward pass adds the gradient of `loss`, a sum over sequences."""
        attached: Tensor = _Attach.apply(activations, loss, self.weight)
        return attached


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activations: Tensor, loss: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return activations.view_as(activations)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad, weight, None
