"""Activation checkpointing: what the backward pass needs is computed again rather than kept.

``full`` keeps the input of each layer and computes the layer once more in the backward pass; ``selective`` computes
only its feed-forward half again, with the norm before it: in llama's layers about three fifths of what a layer keeps,
for less than half of its arithmetic. The same operations run on the same numbers, so gradients are equal to the last
bit (tests/numerics/test_recomputation.py).

The methods of a layer are replaced, not its modules: parameters keep their names.

Under ZeRO 3 the second computation is a backward pass of its own (torch calls it reentrant). DeepSpeed's hooks (0.19.8,
runtime/zero/parameter_offload.py) let go of a module's weights after each forward pass: with the other way, in which
the second computation hands its tensors to the backward pass that is under way, the weights would be gone when their
gradients come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_RECOMPUTED = {"full": "forward", "selective": "_forward_mlp"}
"""The method of megatron-core's TransformerLayer (0.16.1) that is computed again."""


def apply(layers: Iterable[torch.nn.Module], mode: str) -> None:
    """Let each of `layers` work as ``activation_checkpointing: <mode>`` says; once for a model."""
    if mode == "off":
        return
    for layer in layers:
        setattr(layer, _RECOMPUTED[mode], _recomputing(getattr(layer, _RECOMPUTED[mode]), layer))


def _recomputing(forward: Callable[..., Any], layer: torch.nn.Module) -> Callable[..., Any]:
    def recomputing(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():  # a validation has no backward pass
            return forward(*arguments, **named)
        # What is reentrant finds the tensors that have gradients only where they stand in a row.
        number, names = len(arguments), list(named)

        def again(*values: Any) -> Any:
            return forward(*values[:number], **dict(zip(names, values[number:], strict=True)))

        under_zero_3 = hasattr(next(layer.parameters()), "ds_id")
        return checkpoint(
            again,
            *arguments,
            *named.values(),
            use_reentrant=under_zero_3,
            preserve_rng_state=False,  # dropout is 0: nothing is drawn
        )

    return recomputing
