"""A Hugging Face folder → the model that stock transformers load from it.

Weights come from safetensors on this machine only; no code of the folder is run.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    import transformers  # half a second to import, and each training process imports this module

    with quiet(progress_bar=sys.stderr.isatty()):
        model, report = getattr(transformers, family.auto_class).from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    return model, report_faults(report)


def stock_model_of(
    shape: ModelShape,
    weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    special: families.SpecialIds,
    dtype: str = "fp32",
    device: torch.device | str = "cpu",
) -> Any:
    """Return the transformers model of `weights` (our parameter names → unpartitioned tensors), for inference.

    For other weights, make another: that takes 20 to 60 ms and no second copy of the weights. Tensors that are in
    `dtype` on `device` already are shared where the rules only name or cut them, so the model is to be used, and let
    go, before training changes them. `dtype` is ``fp32`` or ``bf16``.

    Raises:
        RunError: the weights do not fit the rules; lists every tensor at fault.
    """
    import transformers

    family = families.FAMILIES[shape.architecture]
    given = dict(weights)
    config = families.hf_config(shape, special, dtype)
    rules = families.rules_for(shape)
    weight_rules.check(
        rules,
        {name: tuple(tensor.shape) for name, tensor in given.items()},
        families.hf_shapes(shape, config),
        shape,
    )
    torch_dtype = families.TORCH_DTYPES[dtype]
    # Detached: a parameter of the module that is trained must not become one of this model.
    ours = {name: tensor.detach() for name, tensor in given.items()}
    theirs = {name: tensor.to(device, torch_dtype) for name, tensor in weight_rules.to_hf(rules, ours, shape)}
    with quiet(progress_bar=False):
        model, report = getattr(transformers, family.class_name).from_pretrained(
            None,
            config=type(config).from_dict(config.to_dict()),  # as from config.json: T5 ties by what it finds there
            state_dict=theirs,
            dtype=torch_dtype,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    if faults := report_faults(report):
        raise RunError(f"stock transformers do not take the weights: {'; '.join(faults)}")
    return model.to(device).eval().requires_grad_(False)


@contextmanager
def quiet(progress_bar: bool) -> Iterator[None]:
    """Keep transformers from warning that T5's separate output matrix is not tied, as it should be."""
    from transformers.utils import logging

    verbosity, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not progress_bar:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()


def report_faults(report: Mapping[str, Collection[object]]) -> list[str]:
    """What transformers' loading report complains about."""
    return [f"{name}: {sorted(map(str, keys))}" for name, keys in report.items() if keys]
