"""What a curriculum is made of: the stages of `stages:` in `config.yaml`, and the rules within and between them.

Nothing here looks at the data: how many sequences a source holds is seen in `samples/reading_plan.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from zerokara.config.settings import NaturalNumber, NaturalWhole, PositiveWhole, Text, as_tuple
from zerokara.errors import Fault

if TYPE_CHECKING:
    from zerokara.config.pretrain_config import PretrainConfig


Proportional = Literal["proportional"]
Weights = Annotated[Proportional | tuple[NaturalNumber, ...], BeforeValidator(as_tuple)]
Order = Literal["shuffle", "sequential"]


class Stage(BaseModel):
    """One stage of a curriculum. What is not given is None; `order` and `source_weights` then are the top level's."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    tokens: PositiveWhole | Literal["rest"] | None = None
    """Tokens to train on in this stage; `rest`, in the last stage, is all that the run has left."""
    source_weights: Weights | None = None
    """As at the top level."""
    source_tokens: Annotated[tuple[NaturalWhole, ...], BeforeValidator(as_tuple)] | None = None
    """Instead of tokens and weights: exactly so many tokens of each entry of input_jsonl."""
    order: Order | None = None
    """As at the top level."""
    name: Text | None = None
    """What to call the stage in the log."""

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Only what is given."""
        yield from ((key, value) for key in type(self).model_fields if (value := getattr(self, key)) is not None)

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the stage; None for `rest`."""
        if self.source_tokens is not None:
            return sum(self.source_tokens)
        return self.tokens if isinstance(self.tokens, int) else None


def declared_tokens(stages: Sequence[Stage]) -> int | None:
    """Tokens of all stages together; None when there are none, or the last is `rest`."""
    counts = [stage.num_tokens for stage in stages]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def faults(config: PretrainConfig) -> Iterator[Fault]:
    """The faults of `source_weights` and of every stage."""
    yield from _weight_faults(config, "source_weights", config.source_weights)
    last = len(config.stages) - 1
    for index, stage in enumerate(config.stages):
        place = f"stages[{index}]"
        yield from _weight_faults(config, f"{place}.source_weights", stage.source_weights)
        yield from _weight_faults(config, f"{place}.source_tokens", stage.source_tokens)
        if stage.source_tokens is not None:
            for key in ("tokens", "source_weights"):
                if getattr(stage, key) is not None:
                    yield config.fault(f"{place}.{key}", "stands beside source_tokens, which says it", "keep one")
        elif stage.tokens is None:
            yield config.fault(place, "does not say how long it is", "give it tokens, or source_tokens")
        elif stage.tokens == "rest" and index != last:
            yield config.fault(f"{place}.tokens", "must be a number in every stage but the last")
    known = declared_tokens(config.stages)
    if known is not None and config.train_tokens != "auto" and config.train_tokens > known:
        rule = f"is more than the stages have: {known:,} tokens together"
        remedy = "set it to auto, or let a last stage have `tokens: rest`"
        yield config.fault("train_tokens", rule, remedy)


def _weight_faults(config: PretrainConfig, key: str, weights: Sequence[float] | str | None) -> Iterator[Fault]:
    if weights is None or isinstance(weights, str):
        return
    entries = config.input_jsonl
    if len(weights) != len(entries):
        names = ", ".join(entries)
        rule = f"must have one number for each of the {len(entries)} entries of input_jsonl: {names}"
        yield config.fault(key, rule)
    elif math.fsum(weights) <= 0:
        yield config.fault(key, "must have a number above 0")
