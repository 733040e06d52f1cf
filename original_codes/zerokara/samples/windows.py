"""Overlapping windows of a document: each token is predicted once, and hardly ever from little context.

A document stands alone: one start token, its tokens, and its end token where there is one. A document longer than the
context is read in windows that overlap. The first predicts all its tokens but the start; each further one moves on by a
stride and predicts the tokens that are new in it, which then have all the others of the window before them.

Example, a context of 4, a stride of 2, tokens 0 … 7 (0 is the start token): inputs 0 1 2 3 predict 1 2 3 4, inputs
2 3 4 5 predict 5 6, and inputs 3 4 5 6 predict 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """A stretch of a document's tokens; its targets from `first_target` on are scored."""

    document: int
    begin: int
    """Index of its first input in the document's tokens (the start token has index 0)."""
    end: int
    """Index after its last target."""
    first_target: int

    @property
    def num_inputs(self) -> int:
        """Positions that it takes."""
        return self.end - self.begin - 1


def stride_of(context_length: int, min_context: float) -> int:
    """Tokens by which windows advance, so that all but the first ones score after `min_context` of the context."""
    return max(1, round(context_length * (1 - min_context)))


def windows(num_tokens: int, context_length: int, stride: int, document: int = 0) -> Iterator[Window]:
    """Cut a document of `num_tokens` (start and end included) so that each but the first is a target once."""
    end = min(num_tokens, context_length + 1)
    if end > 1:
        yield Window(document, 0, end, 1)
    while end < num_tokens:
        first, end = end, min(num_tokens, end + stride)
        yield Window(document, end - 1 - context_length, end, first)
