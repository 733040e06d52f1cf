"""What the model reads and what it must predict: a table entry for each objective of training.

In: token ids [b, S + 1] of b samples. Out: a `Batch` of arrays. Shapes: b samples, S positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


def causal(tokens: NDArray[np.int64], real: NDArray[np.bool_] | None = None) -> Batch:
    """Predict each next token. Every token counts, the end of a document too, or the model would never learn to stop.

    `real`, like `tokens` [b, S + 1], is False on padding.
    """
    mask = np.ones(tokens[:, 1:].shape, np.float32) if real is None else real[:, 1:].astype(np.float32)
    return Batch(np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]), mask)


Objective = Callable[[NDArray[np.int64], NDArray[np.bool_] | None], Batch]

OBJECTIVES: dict[str, Objective] = {"causal": causal}
