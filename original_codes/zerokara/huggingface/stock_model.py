"""Models of stock transformers, loaded from a folder or made of weights in memory; and fp32 layer by layer.

Weights come from safetensors on this machine only; no code of the folder is run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from zerokara.errors import RunError
from zerokara.huggingface import families, weight_rules
from zerokara.huggingface.weight_rules import Family
from zerokara.model.shapes import ModelShape
from zerokara.progress import Progress

_LAYER = re.compile(r"(.+\.)?(layers|h|block)\.\d+")
"""Names of the layers, in our models and in those of transformers."""


def load(folder: Path, dtype: torch.dtype, family: Family) -> tuple[Any, list[str]]:
    """Return the model on the CPU, and what the loading report complains about: missing, unexpected, other shapes."""
    return _loaded(family.auto_class, folder, dtype, progress_bar=sys.stderr.isatty(), use_safetensors=True)


def stock_model_of(
    shape: ModelShape,
    weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    special: families.SpecialIds,
    dtype: str = "fp32",
    device: torch.device | str = "cpu",
) -> Any:
    """Return the transformers model of `weights` (our parameter names → unpartitioned tensors), for inference.

    For other weights, make another: that takes 20 to 60 ms and no second copy of the weights. Tensors that are in
    `dtype` (``fp32`` or ``bf16``) on `device` already are shared where the rules only name or cut them, so the model is
    to be used, and let go, before training changes them.

    Raises:
        RunError: the weights do not fit the rules; lists every tensor at fault.
    """
    # Detached: a parameter of the module that is trained must not become one of this model.
    ours = {name: tensor.detach() for name, tensor in dict(weights).items()}
    config, rules = families.hf_config(shape, special, dtype), families.rules_for(shape)
    hf_shapes = families.hf_shapes(shape, config)
    weight_rules.check(rules, {name: tuple(tensor.shape) for name, tensor in ours.items()}, hf_shapes, shape)
    torch_dtype = families.TORCH_DTYPES[dtype]
    model, faults = _loaded(
        families.FAMILIES[shape.architecture].class_name,
        None,
        torch_dtype,
        config=type(config).from_dict(config.to_dict()),  # as from config.json: T5 ties by what it finds there
        state_dict={name: tensor.to(device, torch_dtype) for name, tensor in weight_rules.to_hf(rules, ours, shape)},
    )
    if faults:
        raise RunError(f"stock transformers do not take the weights: {'; '.join(faults)}")
    return model.to(device).eval().requires_grad_(False)


def _loaded(
    class_name: str, folder: Path | None, dtype: torch.dtype, progress_bar: bool = False, **more: Any
) -> tuple[Any, list[str]]:
    """The model, and what the loading report complains about; without a warning that T5's separate output matrix is not
    tied, as it should be."""
    import transformers  # half a second to import, and each training process imports this module
    from transformers.utils import logging

    verbosity, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not progress_bar:
        logging.disable_progress_bar()
    try:
        model, report = getattr(transformers, class_name).from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True, **more
        )
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()
    return model, [f"{name}: {sorted(map(str, keys))}" for name, keys in report.items() if keys]


def device() -> torch.device:
    """Device of the proof: a GPU if there is one, also for megatron-core, which asks for it."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def layer_by_layer(
    model: Module, content: Callable[[str, Parameter], Tensor], label: str, num_passes: int
) -> Iterator[None]:
    """Let a model compute in fp32 without an fp32 copy of its weights: each layer has them only while it computes.

    `content` gives a parameter's values by its name; what is outside the layers has them all the time. A parameter may
    be narrower than its content, lie in a mapped file, or be empty (torch's device ``meta``). Each pass converts all
    weights, so all tokens should go through in few; `label` and `num_passes` are for the progress bar.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def fill(modules: Iterable[Module]) -> list[tuple[Module, str, Parameter]]:
        """Fill the modules; return their own parameters."""
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
