"""Models with the initial weights of a seed: what each process of a training holds of them when it begins."""

from typing import Any

import torch

from zerokara.model import builder, parallel
from zerokara.model.initial_weights import fill
from zerokara.model.shapes import ModelShape


def build(shape: ModelShape, dtype: torch.dtype = torch.float32, seed: int | None = 0, **options: Any) -> builder.Model:
    """Build a model with the weights of `seed`, drawn in fp32 and rounded to `dtype`; None leaves them undefined."""
    model = builder.build(shape, **options)
    for name, parameter in model.named_parameters() if seed is not None else ():
        whole = torch.empty(shape.parameter_shapes()[name])
        fill(whole, name, shape, seed or 0)
        parameter.data.copy_(parallel.local_shard(whole, shape.partition(name)))
    return model.to(dtype)
