"""The texts on which two models are compared, cut into windows and put side by side for few passes.

Shape suffixes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zerokara.model.shapes import ModelShape
from zerokara.progress import Progress
from zerokara.samples.objective import Objective, Prompt

MIN_POSITIONS, MAX_POSITIONS = 128, 2048
"""Tokens compared: a wrong rule shows at each of them."""
FLOPS_BUDGET = 0.3e12
"""For one pass over all of them: three seconds on two cores."""
LOGITS_BUDGET = 32_000_000
"""Logits held in memory at once, 128 MB of fp32: with a large vocabulary fewer tokens are compared."""
BF16_SHARE = 4
"""Computing in bf16 is for the report, and slow on processors that have no instructions for it: one token in four."""
_BATCH_POSITIONS = 1024

Model = Callable[..., Tensor]
"""Makes logits [B, S, V] of tokens [B, S], and where there is an encoder of what it reads and where that is, [B, R]."""


@dataclass(frozen=True)
class Windows:
    """Windows of token ids."""

    tokens: list[list[int]]
    """What the model (its decoder, where it has an encoder) reads."""
    read: list[list[int]] | None = None
    """What the encoder reads for each."""

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
        return Windows(kept, self.read[: len(kept)] if self.read else None)

    def and_more(self, prompts: Sequence[Prompt], written: Sequence[Sequence[int]]) -> Windows:
        """These, and behind them prompts with what was written after each."""
        texts = [[*prompt.decoder_ids, *tokens] for prompt, tokens in zip(prompts, written, strict=True)]
        read = [*self.read, *(prompt.encoder_ids for prompt in prompts)] if self.read else None
        return Windows([*self.tokens, *texts], read)

    def through(self, model: Model, label: str) -> list[Tensor]:
        """The logits [S, V] of each window; no position sees a later one."""
        found: dict[int, Tensor] = {}
        with Progress(label, self.positions, unit="token") as progress:
            for members in self._batches():
                longest = max(len(self.tokens[number]) for number in members)
                # What fills a row up stands behind it, where nothing of the row looks.
                rows = [self.tokens[number] + [0] * (longest - len(self.tokens[number])) for number in members]
                logits_BSV = model(torch.tensor(rows), *self._read_by(members))
                for number, logits_SV in zip(members, logits_BSV, strict=True):
                    found[number] = logits_SV[: len(self.tokens[number])].clone()
                    progress.advance(len(self.tokens[number]))
        return [found[number] for number in range(len(self.tokens))]

    def _read_by(self, members: Sequence[int]) -> tuple[Tensor, Tensor] | tuple[()]:
        """What encoders read of some windows, and where their texts are: nothing where there are none."""
        if self.read is None:
            return ()
        texts = [self.read[number] for number in members]
        longest = max(map(len, texts))
        rows = [text + [0] * (longest - len(text)) for text in texts]
        there = [[1] * len(text) + [0] * (longest - len(text)) for text in texts]
        return torch.tensor(rows), torch.tensor(there)

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


def of_samples(documents: Sequence[Sequence[int]], shape: ModelShape, objective: Objective) -> Windows:
    """Documents as an encoder and a decoder have them in training: texts with gaps, as many as the budgets allow."""
    taken = objective.lengths.raw
    stream = np.array([token for document in documents for token in document], dtype=np.int64)
    if not len(stream):
        return Windows([], [])
    number = max(1, min(_budget(shape) // objective.lengths.target, -(-len(stream) // taken)))
    places = np.arange(number)
    batch = objective(stream[(places[:, None] * taken + np.arange(taken)) % len(stream)], places)
    assert batch.decoder_inputs is not None, "there is an encoder"
    return Windows(batch.decoder_inputs.tolist(), batch.inputs.tolist())


def _budget(shape: ModelShape) -> int:
    affordable = int(FLOPS_BUDGET / (2 * shape.num_parameters()))
    return min(MAX_POSITIONS, max(2, LOGITS_BUDGET // shape.padded_vocab_size), max(MIN_POSITIONS, affordable))


def within_budget(documents: Sequence[Sequence[int]], shape: ModelShape) -> Windows:
    """Cut documents into windows of at most `seq_len` tokens, as many as the budgets of time and memory allow."""
    left = _budget(shape)
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
