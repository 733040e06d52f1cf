"""The texts on which two models are compared: windows of token ids, batched for few forward passes.

Shape suffixes: B batch, S sequence, R encoder sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from zerokara.model.shapes import ModelShape
from zerokara.progress import Progress
from zerokara.samples.objective import Objective, Prompt

MIN_POSITIONS, MAX_POSITIONS = 128, 2048
"""Tokens compared: a wrong rule shows at every one of them."""
FLOPS_BUDGET = 0.3e12
"""For one forward pass over all of them: three seconds on two cores."""
LOGITS_BUDGET = 32_000_000
"""Logits held in memory at once, 128 MB of fp32: with a large vocabulary fewer tokens are compared."""
BF16_SHARE = 4
"""bf16 is only reported, and slow on processors without instructions for it: one token in four."""
_BATCH_POSITIONS = 1024

Model = Callable[..., Tensor]
"""Tokens [B, S] → logits [B, S, V]; with an encoder, also its input ids and attention mask, [B, R]."""


@dataclass(frozen=True)
class Windows:
    """Windows of token ids."""

    tokens: list[list[int]]
    """Inputs of the model, or of its decoder if it has an encoder."""
    encoder_input_ids: list[list[int]] | None = None
    """Inputs of the encoder for each window; None without an encoder."""

    @property
    def positions(self) -> int:
        """Number of tokens in all windows."""
        return sum(map(len, self.tokens))

    def first(self, positions: int) -> Windows:
        """The first windows, cut off after `positions` tokens."""
        kept: list[list[int]] = []
        for window in self.tokens:
            left = positions - sum(map(len, kept))
            if left <= 0:
                break
            kept.append(window[:left])
        return Windows(kept, self.encoder_input_ids[: len(kept)] if self.encoder_input_ids else None)

    def with_prompts(self, prompts: Sequence[Prompt], generated: Sequence[Sequence[int]]) -> Windows:
        """These windows, and one more for each prompt with what was generated after it."""
        texts = [[*prompt.decoder_ids, *tokens] for prompt, tokens in zip(prompts, generated, strict=True)]
        encoder_inputs = self.encoder_input_ids and [
            *self.encoder_input_ids,
            *(prompt.encoder_ids for prompt in prompts),
        ]
        return Windows([*self.tokens, *texts], encoder_inputs)

    def through(self, model: Model, label: str) -> list[Tensor]:
        """The logits [S, V] of each window from `model`; `label` names the work on the progress bar."""
        logits: dict[int, Tensor] = {}
        with Progress(label, self.positions, unit="token") as progress:
            for members in self._batches():
                longest = max(len(self.tokens[number]) for number in members)
                # The model is causal, so the padding at the end changes nothing before it.
                rows = [self.tokens[number] + [0] * (longest - len(self.tokens[number])) for number in members]
                logits_BSV = model(torch.tensor(rows), *self._encoder_inputs(members))
                for number, logits_SV in zip(members, logits_BSV, strict=True):
                    logits[number] = logits_SV[: len(self.tokens[number])].clone()
                    progress.advance(len(self.tokens[number]))
        return [logits[number] for number in range(len(self.tokens))]

    def _encoder_inputs(self, members: Sequence[int]) -> tuple[Tensor, Tensor] | tuple[()]:
        """Encoder input ids and attention mask [B, R] of some windows; nothing without an encoder."""
        if self.encoder_input_ids is None:
            return ()
        texts = [self.encoder_input_ids[number] for number in members]
        longest = max(map(len, texts))
        rows = [text + [0] * (longest - len(text)) for text in texts]
        mask = [[1] * len(text) + [0] * (longest - len(text)) for text in texts]
        return torch.tensor(rows), torch.tensor(mask)

    def _batches(self) -> list[list[int]]:
        """Indices of the windows of each batch, of similar lengths."""
        batches: list[list[int]] = []
        for number in sorted(range(len(self.tokens)), key=lambda number: -len(self.tokens[number])):
            # The first of a batch is its longest.
            if batches and (len(batches[-1]) + 1) * len(self.tokens[batches[-1][0]]) <= _BATCH_POSITIONS:
                batches[-1].append(number)
            else:
                batches.append([number])
        return batches


def of_samples(documents: Iterable[Sequence[int]], shape: ModelShape, objective: Objective) -> Windows:
    """Samples as in training of an encoder-decoder, with masked spans, as many as the budgets allow."""
    raw = objective.lengths.raw
    most = max(1, _budget(shape) // objective.lengths.target)
    stream = np.fromiter(islice(chain.from_iterable(documents), most * raw), dtype=np.int64)
    if not len(stream):
        return Windows([], [])
    keys = np.arange(-(-len(stream) // raw))
    batch = objective(stream[(keys[:, None] * raw + np.arange(raw)) % len(stream)], keys)
    assert batch.decoder_inputs is not None, "there is an encoder"
    return Windows(batch.decoder_inputs.tolist(), batch.inputs.tolist())


def _budget(shape: ModelShape) -> int:
    affordable = int(FLOPS_BUDGET / (2 * shape.num_parameters()))
    return min(MAX_POSITIONS, max(2, LOGITS_BUDGET // shape.padded_vocab_size), max(MIN_POSITIONS, affordable))


def within_budget(documents: Iterable[Sequence[int]], shape: ModelShape) -> Windows:
    """Cut documents into windows of at most `seq_len` tokens, as many as the budgets of time and memory allow."""
    left = _budget(shape)
    windows = []
    for document in documents:
        for start in range(0, len(document), shape.seq_len):
            window = list(document[start : start + min(shape.seq_len, left)])
            if len(window) > 1:
                windows.append(window)
                left -= len(window)
            if left < 2:
                return Windows(windows)
    return Windows(windows)
