"""The stages of a curriculum: the entries of `stages:` in `config.yaml`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from zerokara.config.settings import NaturalNumber, NaturalWhole, PositiveWhole, Text, as_tuple

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
