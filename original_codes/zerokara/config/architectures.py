"""What an architecture is made of: the choices that its name stands for, in one table.

Whoever needs to know asks for a choice (`gated`, `encodes`), never for a name: a further architecture is then a line
here, and an entry in each of the tables that build, train and export it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal["llama", "qwen3", "gpt2", "mixtral", "qwen3_moe", "t5", "switch", "t5_moe"]


@dataclass(frozen=True)
class Architecture:
    """The choices of one architecture."""

    gated: bool = True
    """Whether the feed-forward layers have a gate beside their rising matrix."""
    has_biases: bool = False
    """Whether matrices and norms have a bias."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normed, with one weight for all heads of a layer."""
    positions: Literal["rotary", "learned", "relative"] = "rotary"
    """Queries and keys are turned by their position; each position has a vector; each distance has a bias."""
    supports_gqa: bool = True
    """Whether several query heads may share one key and value head."""
    is_encoder_decoder: bool = False
    """Whether an encoder reads, and a decoder that looks at it writes."""
    moe_every: int = 0
    """One layer in so many holds experts, unless moe_layers says which; 0 where none may."""
    experts_per_token: int = 0
    """How many experts a token is given, unless it is said otherwise."""
    no_class: str = ""
    """Why no Hugging Face class holds such a model; empty where one does."""
    objective: Literal["causal", "span_corruption"] = "causal"
    """What is learned: a key of `samples.objective.OBJECTIVES`."""


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
        no_class="SwitchTransformersForConditionalGeneration, the nearest, gives a token one expert, has no gates, and "
        "takes sparse layers at 1, 1 + n, 1 + 2n, … only",
        objective="span_corruption",
    ),
}
