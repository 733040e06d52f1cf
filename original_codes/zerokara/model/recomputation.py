"""Activation checkpointing: what the backward pass needs is computed again rather than kept.

``full`` keeps the input of each layer and computes the layer once more in the backward pass; ``selective`` computes
only its feed-forward half again, with the norm before it: in llama's layers about three fifths of what a layer keeps
(`memory.layer_activations`), for less than half of its arithmetic. The same operations run on the same numbers, so
gradients are equal to the last bit (tests/numerics/test_recomputation.py).

The methods of a layer are replaced, not its modules: parameters keep their names, and the hooks by which ZeRO 3 gathers
the weights of each module fire in the second computation as in the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_RECOMPUTED = {"full": "forward", "selective": "_forward_mlp"}
"""The method of megatron-core's TransformerLayer (0.16.1) that is computed again."""


def apply(layers: torch.nn.ModuleList, mode: str) -> None:
    """Let each of `layers` work as ``activation_checkpointing: <mode>`` says; once for a model."""
    if mode == "off":
        return
    for layer in layers:
        setattr(layer, _RECOMPUTED[mode], _recomputing(getattr(layer, _RECOMPUTED[mode])))


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputing(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():  # a validation has no backward pass
            return forward(*arguments, **named)
        return checkpoint(
            forward,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=False,  # dropout is 0: nothing is drawn
            # Stopping early leaves a module by an exception, before the hook by which ZeRO 3 lets go of its weights.
            early_stop=False,
            **named,
        )

    return recomputing
