"""Weights of tiny models with a large spread, so that logits spread (std > 0.5) and every rule matters to them."""

from dataclasses import replace

import torch
from drawn_models import build
from torch import Tensor

from zerokara.model import parallel
from zerokara.model.shapes import ModelShape


def spread_weights(shape: ModelShape, seed: int = 1) -> dict[str, Tensor]:
    """Weights of our module, wide; the padding rows too, so that whoever lets them win is found out."""
    parallel.start_alone()
    generator = torch.Generator().manual_seed(seed)
    if shape.traits.is_encoder_decoder:  # nothing is scaled: weights as wide as T5's own rule draws them, and no wider
        shape = replace(shape, init_std=0.0)
    weights = {}
    for name, parameter in build(shape).named_parameters():
        mean = 1.0 if name.endswith("layernorm.weight") else 0.0
        weights[name] = mean + 0.2 * torch.randn(parameter.shape, generator=generator)
        if shape.traits.is_encoder_decoder and not mean:
            weights[name] = parameter.detach().clone()
    return weights
