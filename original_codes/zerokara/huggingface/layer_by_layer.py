"""A model that computes in fp32 without an fp32 copy of its weights: each layer has them only while it computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from zerokara.progress import Progress

_LAYER = re.compile(r"(.+\.)?(layers|h|block)\.\d+")
"""Names of the layers, in our models and in those of transformers."""


def device() -> torch.device:
    """Where the proof computes: on a GPU if there is one, also megatron-core, which asks for it."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def layer_by_layer(
    model: Module, content: Callable[[str, Parameter], Tensor], label: str, num_passes: int
) -> Iterator[None]:
    """Give each layer the `content` of its parameters while it computes, and what is outside the layers meanwhile.

    A parameter may be narrower than its content, lie in a mapped file, or be empty (torch's device ``meta``). Each pass
    converts all weights, so all tokens should go through in few; their number is for the progress bar, which has
    the `label`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def fill(modules: Iterable[Module]) -> list[tuple[Module, str, Parameter]]:
        """Fill the modules; returns what they had."""
        had = [(module, key, own) for module in modules for key, own in module._parameters.items() if own is not None]
        with torch.inference_mode(False), torch.no_grad():
            # Shared parameters stay one. megatron-core chooses its linear function by `requires_grad`, as in training.
            full = {
                id(own): Parameter(content(names[id(own)], own).float().to(device()), own.requires_grad)
                for *_, own in had
            }
        for module, key, own in had:
            module._parameters[key] = full[id(own)]
        return had

    def restore(had: list[tuple[Module, str, Parameter]]) -> None:
        for module, key, own in had:
            module._parameters[key] = own
        had.clear()

    layers = [module for name, module in model.named_modules() if _LAYER.fullmatch(name)]
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = fill(module for module in model.modules() if id(module) not in inside)
    computing: list[tuple[Module, str, Parameter]] = []
    with Progress(label, len(layers) * num_passes, unit="layer") as progress:

        def before(layer: Module, _: Any) -> None:
            computing.extend(fill(layer.modules()))

        def after(*_: Any) -> None:
            restore(computing)
            progress.advance()

        hooks = [
            layer.register_forward_pre_hook(lambda own, _: computing.extend(fill(own.modules()))) for layer in layers
        ]
        hooks += [layer.register_forward_hook(after) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            restore(computing + outside)
