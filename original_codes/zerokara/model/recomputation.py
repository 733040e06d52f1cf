"""Activation checkpointing (recomputation): activations are recomputed in the backward pass rather than kept.

``full`` keeps the input of each layer and recomputes the whole layer; ``selective`` recomputes only its feed-forward
half, with the norm before it: about three fifths of what one of llama's layers keeps, for less than half of its
arithmetic. The same operations run on the same numbers, so gradients are equal to the last bit
(tests/numerics/test_recomputation.py).

The methods of a layer are replaced, not its modules: parameters keep their names.

Under ZeRO 3 torch's reentrant variant is used, in which recomputation is a backward pass of its own. DeepSpeed's hooks
(0.19.8, runtime/zero/parameter_offload.py) release a module's weights after each forward pass: with the other variant,
which hands the recomputed tensors to the backward pass that is under way, the weights would be gone when their
gradients come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_RECOMPUTED = {"full": "forward", "selective": "_forward_mlp"}
"""The method of megatron-core's TransformerLayer (0.16.1) that is recomputed."""


def apply(layers: Iterable[torch.nn.Module], mode: str) -> None:
    """Apply ``activation_checkpointing: <mode>`` to each of `layers`; once for a model."""
    if mode == "off":
        return
    for layer in layers:
        setattr(layer, _RECOMPUTED[mode], _recomputing(getattr(layer, _RECOMPUTED[mode]), layer))


def _recomputing(forward: Callable[..., Any], layer: torch.nn.Module) -> Callable[..., Any]:
    def recomputing(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():  # validation has no backward pass
            return forward(*arguments, **named)
        # The reentrant variant finds tensors with gradients among positional arguments only.
        number, names = len(arguments), list(named)

        def again(*values: Any) -> Any:
            return forward(*values[:number], **dict(zip(names, values[number:], strict=True)))

        under_zero_3 = hasattr(next(layer.parameters()), "ds_id")
        return checkpoint(
            again,
            *arguments,
            *named.values(),
            use_reentrant=under_zero_3,
            preserve_rng_state=False,  # dropout is 0: no random numbers
        )

    return recomputing
