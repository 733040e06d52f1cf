"""Our weights in memory → the stock transformers model of them, without a folder between.

It is the model that the export writes and stock transformers load: the same weight rules, the same configuration as it
reads back from ``config.json``. So what it generates during training is what the export will generate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zerokara.errors import RunError
from zerokara.huggingface import families, stock_model, weight_rules
from zerokara.model.shapes import ModelShape


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
    with stock_model.quiet(progress_bar=False):
        model, report = getattr(transformers, family.class_name).from_pretrained(
            None,
            config=type(config).from_dict(config.to_dict()),  # as from config.json: T5 ties by what it finds there
            state_dict=theirs,
            dtype=torch_dtype,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    if faults := stock_model.report_faults(report):
        raise RunError(f"stock transformers do not take the weights: {'; '.join(faults)}")
    return model.to(device).eval().requires_grad_(False)
