"""What the model reads and what it must predict: a table entry for each objective of training.

In: token ids [b, S + 1] of b samples. Out: a `Batch` of arrays. Shapes: b samples, S positions.

Where documents are isolated, each position has the number of its document in the sequence, its *segment*: how many
ends of documents (EOD) stand among the inputs up to it, itself included. An EOD that is read opens the next document,
as a ``<s>`` would. Example, inputs 7 8 EOD 5 6 EOD: segments 0 0 1 1 1 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Batch:
    """One micro batch as the model takes it."""

    inputs: NDArray[np.int64]
    """Ids that the model reads, [b, S]."""
    labels: NDArray[np.int64]
    """The id to predict at each position, [b, S]."""
    loss_mask: NDArray[np.float32]
    """1 where the prediction counts, 0 on padding, [b, S]."""
    segments: NDArray[np.int64] | None = None
    """The document in the sequence, counted from 0, [b, S]; None where documents are not told apart."""


def causal(tokens: NDArray[np.int64], real: NDArray[np.bool_] | None = None, isolate_at: int | None = None) -> Batch:
    """Predict each next token. Every token counts, the end of a document too, or the model would never learn to stop.

    `real`, like `tokens` [b, S + 1], is False on padding. `isolate_at` is the EOD's id where documents are isolated.
    """
    mask = np.ones(tokens[:, 1:].shape, np.float32) if real is None else real[:, 1:].astype(np.float32)
    inputs, labels = np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
    segments = None if isolate_at is None else np.cumsum(inputs == isolate_at, axis=1, dtype=np.int64)
    return Batch(inputs, labels, mask, segments)


Objective = Callable[[NDArray[np.int64], NDArray[np.bool_] | None], Batch]

OBJECTIVES: dict[str, Callable[..., Batch]] = {"causal": causal}


def objective(name: str, isolate_at: int | None = None) -> Objective:
    """An entry of the table, with documents isolated where `isolate_at` is the EOD's id."""
    return partial(OBJECTIVES[name], isolate_at=isolate_at)
