"""Architectures by their building blocks, and models by the name of their size: two tables.

Other code asks for a property (`gated`, `is_encoder_decoder`), never for a name: a further architecture is then a line
here, and an entry in each of the tables that build, train and export it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Name = Literal[
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "gpt2", "mixtral", "qwen3_moe", "t5", "switch", "t5_moe"
]  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """The properties of one architecture."""

    gated: bool = True  # feed-forward layers: SwiGLU, gated GELU
    has_biases: bool = False  # in linear layers and norms
    has_qkv_biases: bool = False  # in the projections of queries, keys and values alone
    qk_norm: Literal["", "head", "projection"] = ""
    """Norm of queries and of keys: of each head, with one weight vector for all heads, or of all heads together."""
    norms_outputs: bool = False  # of attention and feed-forward layers, instead of their inputs
    positions: Literal["rotary", "learned", "relative"] = "rotary"  # embedding, embedding, attention bias
    unrotated_every: int = 0  # n: every n-th layer knows no positions (NoPE); 0: all layers do
    supports_gqa: bool = True  # several query heads share one key and value head
    is_encoder_decoder: bool = False  # the decoder has cross-attention to an encoder
    moe_every: int = 0
    """Default of moe_layers: n for experts in every n-th layer; 0 if the architecture has none."""
    experts_per_token: int = 0  # default
    no_class: str = ""
    """Reason why no Hugging Face class can hold such a model; empty if one can."""
    tokenizer_class: str = ""
    """Class by which transformers opens every tokenizer of this family, whatever its files name, and which knows no
    SentencePiece model; empty where the files decide. In transformers 5.23: MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.
    """

    def rotates(self, layer: int) -> bool:
        """True if the layer, counted from 0, has rotary positions, where the architecture has them."""
        return not self.unrotated_every or (layer + 1) % self.unrotated_every != 0


_T5 = Architecture(positions="relative", supports_gqa=False, is_encoder_decoder=True)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(has_qkv_biases=True, tokenizer_class="Qwen2Tokenizer"),
    "qwen3": Architecture(qk_norm="head"),
    "smollm3": Architecture(unrotated_every=4),
    "olmo2": Architecture(qk_norm="projection", norms_outputs=True),
    "gpt2": Architecture(gated=False, has_biases=True, positions="learned", supports_gqa=False),
    "mixtral": Architecture(moe_every=1, experts_per_token=2),
    "qwen3_moe": Architecture(qk_norm="head", moe_every=1, experts_per_token=2),
    "t5": _T5,
    "switch": replace(_T5, gated=False, moe_every=2, experts_per_token=1),
    "t5_moe": replace(
        _T5,
        moe_every=4,
        experts_per_token=2,
        no_class="SwitchTransformersForConditionalGeneration, the nearest, routes a token to one expert, is not gated, "
        "and has experts in layers 1, 1 + n, 1 + 2n, … only",
    ),
}

HEAD_DIM = 64
SizeName = Literal["1M", "3M", "5M", "10M", "20M", "30M", "60M", "125M", "350M", "760M", "1.3B", "2.7B", "6.7B", "13B"]


class ModelSize(NamedTuple):
    """The shape that goes by a name."""

    num_layers: int
    hidden_size: int
    num_attn_heads: int


SIZES: dict[SizeName, ModelSize] = {
    "1M": ModelSize(4, 128, 2),
    "3M": ModelSize(5, 192, 3),
    "5M": ModelSize(4, 256, 4),
    "10M": ModelSize(6, 320, 5),
    "20M": ModelSize(7, 448, 7),
    "30M": ModelSize(8, 512, 8),
    "60M": ModelSize(10, 640, 10),
    "125M": ModelSize(12, 768, 12),
    "350M": ModelSize(24, 1024, 16),
    "760M": ModelSize(24, 1536, 16),
    "1.3B": ModelSize(24, 2048, 16),
    "2.7B": ModelSize(32, 2560, 32),
    "6.7B": ModelSize(32, 4096, 32),
    "13B": ModelSize(40, 5120, 40),
}
"""Shapes in ascending order; an encoder-decoder has half of the layers in the encoder, half in the decoder.

The name is the approximate number of parameters of a decoder, with a vocabulary that fits its size (4,000 pieces at 1M
and 3M, 8,000 at 5M to 30M, 16,000 at 60M, 32,000 from 125M on). From 125M on the shapes are those of GPT-3 (Brown et
al., 2020, table 2.1). Below, as there, the hidden size is about 64 per layer and per head; between half and twice that
proportion the loss hardly changes (Kaplan et al., 2020, figure 5).
"""
