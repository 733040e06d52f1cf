"""Models by the name of their size: layers, hidden size and attention heads in good proportion.

A name says about how many parameters a decoder has, with a vocabulary that fits its size (4,000 pieces at 1M and 3M,
8,000 at 5M to 30M, 16,000 at 60M, 32,000 from 125M on). From 125M on the shapes are those of GPT-3 (Brown et al., 2020,
table 2.1), which most later families took over. Below, as there, the hidden size is about 64 for each layer and a head
has 64; four layers are the fewest. Between half and twice that proportion the loss hardly changes (Kaplan et al., 2020,
figure 5).

An encoder-decoder has half of the layers in the encoder, and half in the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

HEAD_DIM = 64

SizeName = Literal["1M", "3M", "5M", "10M", "20M", "30M", "60M", "125M", "350M", "760M", "1.3B", "2.7B", "6.7B", "13B"]


@dataclass(frozen=True)
class ModelSize:
    """The shape that goes by a name."""

    num_layers: int
    hidden_size: int
    head_dim: int = HEAD_DIM

    @property
    def num_attn_heads(self) -> int:
        """As many as fill the hidden size."""
        return self.hidden_size // self.head_dim


SIZES: dict[SizeName, ModelSize] = {
    "1M": ModelSize(4, 128),
    "3M": ModelSize(5, 192),
    "5M": ModelSize(4, 256),
    "10M": ModelSize(6, 320),
    "20M": ModelSize(7, 448),
    "30M": ModelSize(8, 512),
    "60M": ModelSize(10, 640),
    "125M": ModelSize(12, 768),
    "350M": ModelSize(24, 1024),
    "760M": ModelSize(24, 1536, 96),
    "1.3B": ModelSize(24, 2048, 128),
    "2.7B": ModelSize(32, 2560, 80),
    "6.7B": ModelSize(32, 4096, 128),
    "13B": ModelSize(40, 5120, 128),
}
"""From the smallest to the largest."""


def size_named(name: SizeName, is_encoder_decoder: bool) -> ModelSize:
    """The shape of a model; of an encoder-decoder, whose layers count in each half, with half of the layers."""
    size = SIZES[name]
    return replace(size, num_layers=size.num_layers // 2) if is_encoder_decoder else size
