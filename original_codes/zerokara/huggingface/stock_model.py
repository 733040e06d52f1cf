"""The models of stock transformers: loaded from a folder, or made of weights in memory.

Weights come from safetensors on this machine only; no code of the folder is run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokara.errors import RunError
from zerokara.huggingface import families, weight_rules
from zerokara.huggingface.weight_rules import Family
from zerokara.model.shapes import ModelShape


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
