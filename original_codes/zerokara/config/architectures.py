"""The building blocks of each architecture, in one table.

Other code asks for a property (`gated`, `is_encoder_decoder`), never for a name: a further architecture is then a line
here, and an entry in each of the tables that build, train and export it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal["llama", "qwen3", "gpt2", "mixtral", "qwen3_moe", "t5", "switch", "t5_moe"]


@dataclass(frozen=True)
class Architecture:
    """The properties of one architecture."""

    gated: bool = True
    """Whether the feed-forward layers are gated (SwiGLU, gated GELU)."""
    has_biases: bool = False
    """Whether linear layers and norms have a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalized, with one weight vector for all heads of a layer."""
    positions: Literal["rotary", "learned", "relative"] = "rotary"
    """Rotary position embedding, learned position embedding, or relative position bias."""
    supports_gqa: bool = True
    """Whether grouped-query attention is possible: several query heads that share one key and value head."""
    is_encoder_decoder: bool = False
    """Whether an encoder stands before the decoder, which has cross-attention to it."""
    moe_every: int = 0
    """Default of moe_layers: n for experts in every n-th layer; 0 if the architecture has none."""
    experts_per_token: int = 0
    """Default of experts_per_token."""
    no_class: str = ""
    """Reason why no Hugging Face class can hold such a model; empty if one can."""
    objective: Literal["causal", "span_corruption"] = "causal"
    """Training objective: a key of `samples.objective.OBJECTIVES`."""


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "qwen3": Architecture(qk_norm=True),
    "gpt2": Architecture(gated=False, has_biases=True, positions="learned", supports_gqa=False),
    "mixtral": Architecture(moe_every=1, experts_per_token=2),
    "qwen3_moe": Architecture(qk_norm=True, moe_every=1, experts_per_token=2),
    "t5": Architecture(positions="relative", supports_gqa=False, is_encoder_decoder=True, objective="span_corruption"),
    "switch": Architecture(
        gated=False,
        positions="relative",
        supports_gqa=False,
        is_encoder_decoder=True,
        moe_every=2,
        experts_per_token=1,
        objective="span_corruption",
    ),
    "t5_moe": Architecture(
        positions="relative",
        supports_gqa=False,
        is_encoder_decoder=True,
        moe_every=4,
        experts_per_token=2,
        no_class="SwitchTransformersForConditionalGeneration, the nearest, routes a token to one expert, is not gated, "
        "and has experts in layers 1, 1 + n, 1 + 2n, … only",
        objective="span_corruption",
    ),
}
