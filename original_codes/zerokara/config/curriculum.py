"""The stages of a curriculum: the entries of `stages:` in `config.yaml`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from zerokara.config.settings import NaturalNumber, NaturalWhole, PositiveWhole, Text, as_tuple

Weights = Annotated[Literal["proportional"] | tuple[NaturalNumber, ...], BeforeValidator(as_tuple)]
OrderKind = Literal["shuffle", "sequential"]


class Stage(BaseModel):
    """One stage of a curriculum. A setting not given is None; `order` and `source_weights` are then the run's."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    tokens: PositiveWhole | Literal["rest"] | None = None
    """Tokens to train on in this stage; in the last stage `rest` is the remainder of the run."""
    source_weights: Weights | None = None
    """As in the run."""
    source_tokens: Annotated[tuple[NaturalWhole, ...], BeforeValidator(as_tuple)] | None = None
    """Instead of tokens and weights: the exact number of tokens from each entry of input_jsonl."""
    order: OrderKind | None = None
    """As in the run."""
    name: Text | None = None
    """Name of the stage in the log."""

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Only the settings that are given."""
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
