"""The texts on which two models are compared, cut into windows and put side by side for few passes.

Shape suffixes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerokara.model.shapes import ModelShape
from zerokara.progress import Progress

MIN_POSITIONS, MAX_POSITIONS = 128, 2048
"""Tokens compared: a wrong rule shows at each of them."""
FLOPS_BUDGET = 0.3e12
"""For one pass over all of them: three seconds on two cores."""
LOGITS_BUDGET = 32_000_000
"""Logits held in memory at once, 128 MB of fp32: with a large vocabulary fewer tokens are compared."""
BF16_SHARE = 4
"""Computing in bf16 is for the report, and slow on processors that have no instructions for it: one token in four."""
_BATCH_POSITIONS = 1024


@dataclass(frozen=True)
class Windows:
    """Windows of token ids."""

    tokens: list[list[int]]

    @property
    def positions(self) -> int:
        """Tokens in all."""
        return sum(map(len, self.tokens))

    def first(self, positions: int) -> Windows:
        """The first so many positions, and no whole window less than one."""
        kept: list[list[int]] = []
        for window in self.tokens:
            left = positions - sum(map(len, kept))
            if left <= 0:
                break
            kept.append(window[:left])
        return Windows(kept)

    def through(self, model: Callable[[Tensor], Tensor], label: str) -> list[Tensor]:
        """The logits [S, V] of each window; `model` makes [B, S, V] of [B, S], and no position sees a later one."""
        found: dict[int, Tensor] = {}
        with Progress(label, self.positions, unit="token") as progress:
            for members in self._batches():
                longest = max(len(self.tokens[number]) for number in members)
                # What fills a row up stands behind it, where nothing of the row looks.
                rows = [self.tokens[number] + [0] * (longest - len(self.tokens[number])) for number in members]
                logits_BSV = model(torch.tensor(rows))
                for number, logits_SV in zip(members, logits_BSV, strict=True):
                    found[number] = logits_SV[: len(self.tokens[number])].clone()
                    progress.advance(len(self.tokens[number]))
        return [found[number] for number in range(len(self.tokens))]

    def _batches(self) -> list[list[int]]:
        """Numbers of windows that go through the model together, of similar lengths."""
        batches: list[list[int]] = []
        for number in sorted(range(len(self.tokens)), key=lambda number: -len(self.tokens[number])):
            # The first of a batch is its longest.
            if batches and (len(batches[-1]) + 1) * len(self.tokens[batches[-1][0]]) <= _BATCH_POSITIONS:
                batches[-1].append(number)
            else:
                batches.append([number])
        return batches


def within_budget(documents: Sequence[Sequence[int]], shape: ModelShape) -> Windows:
    """Cut documents into windows of at most `seq_len` tokens, as many as the budgets of time and memory allow."""
    affordable = int(FLOPS_BUDGET / (2 * shape.num_parameters()))
    left = min(MAX_POSITIONS, max(2, LOGITS_BUDGET // shape.padded_vocab_size), max(MIN_POSITIONS, affordable))
    windows = []
    for document in documents:
        for start in range(0, len(document), shape.seq_len):
            window = [int(token) for token in document[start : start + min(shape.seq_len, left)]]
            if len(window) > 1:
                windows.append(window)
                left -= len(window)
            if left < 2:
                return Windows(windows)
    return Windows(windows)
