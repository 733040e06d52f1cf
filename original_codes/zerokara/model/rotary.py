"""Rotary positions for longer texts than a model was first trained on: the setting `rope_scaling`.

Frequency f turns a pair of a head's numbers by f radians from one position to the next. Where a pair turned less than
once or so within the original length L, angles beyond L would be new to the model; divided by `factor` they are not.

* ``linear`` divides all frequencies (Chen et al., 2023, arXiv 2306.15595).
* ``llama3`` those that turn fewer than `low_freq_factor` times within L, and not those that turn more than
  `high_freq_factor` times; in between it goes over in a line of the turns (Llama 3.1's code).
* ``yarn`` likewise by `beta_slow` and `beta_fast`, in a line of the frequencies' indices; and it sharpens the attention
  (Peng et al., 2023, arXiv 2309.00071).

The same numbers as transformers' (5.23, modeling_rope_utils.py), which runs what was trained.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zerokara.config.model import RopeScaling


def scaled_frequencies(frequencies: Tensor, rope_theta: float, scaling: RopeScaling) -> Tensor:
    """Return the frequencies theta^(-2i/E) of the indices i = 0 … E/2 - 1, scaled: [E/2]."""
    slow = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return slow
    length, count, (low, high) = scaling.original_max_position_embeddings, len(frequencies), scaling.turns
    assert length is not None, "a rule of the configuration"
    if scaling.rope_type == "llama3":
        kept = (length * frequencies / (2 * math.pi) - low) / (high - low)
    else:  # by the indices of frequencies that turn so often
        last, first = (count * math.log(length / (each * 2 * math.pi)) / math.log(rope_theta) for each in (low, high))
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * count - 1)
        kept = 1 - (torch.arange(count, device=slow.device) - first) / max(last - first, 0.001)
    kept = kept.clamp(0, 1)
    return frequencies * kept + slow * (1 - kept)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Factor of rotated queries and of rotated keys, so that its square multiplies the scores."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
