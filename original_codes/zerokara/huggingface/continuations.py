"""What an exported model writes: prompts continued greedily, and by sampling with a seed, by stock transformers.

All prompts go through `generate` as one batch, padded on the left: each further token of a large model reads all its
weights once, however many prompts there are. Rows to sample are drawn by a logits processor, in the same batch as the
greedy ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from zerokara.model.shapes import ModelShape
from zerokara.progress import Progress
from zerokara.samples.objective import Prompt
from zerokara.tokenizer.encoder import Encoder

MIN_NEW_TOKENS, MAX_NEW_TOKENS = 20, 60
"""The proof asks for at least 20 tokens; a large model writes no more than it must."""
WEIGHTS_BUDGET = 24e9
"""Weights that generation may read in all: 24 tokens of a model of a billion take ten seconds on two cores."""
TEMPERATURE, TOP_P = 0.7, 0.9
SEED = 1234


@dataclass(frozen=True)
class Continuation:
    """One prompt and its continuations, which do not repeat it."""

    prompt: str
    greedy: str
    sampled: str


@dataclass(frozen=True)
class GeneratedTokens:
    """Token ids generated after each prompt, also beyond eos; sampled ones for the first prompts only."""

    prompts: list[Prompt]
    greedy: list[list[int]]
    sampled: list[list[int]]

    def decoded(self, encoder: Encoder, prompts: Sequence[str]) -> list[Continuation]:
        """The continuations of the first prompts, whose texts are `prompts`, up to the end of the document."""

        def text(tokens: list[int]) -> str:
            return encoder.decode_continuation(list(takewhile(lambda token: token != encoder.eos_id, tokens)))

        rows = zip(prompts, self.greedy, self.sampled, strict=False)
        return [Continuation(prompt, text(greedy), text(sampled)) for prompt, greedy, sampled in rows]


def num_new_tokens(shape: ModelShape) -> int:
    """Length of the continuations: as the budget allows, and so that some of a prompt fits before it."""
    affordable = int(WEIGHTS_BUDGET / shape.num_parameters())
    return min(max(MIN_NEW_TOKENS, min(MAX_NEW_TOKENS, affordable)), shape.seq_len - 1)


def generate(model: Any, prompts: Sequence[Prompt], num_sampled: int, shape: ModelShape) -> GeneratedTokens:
    """Continue each prompt greedily, and the first `num_sampled` by sampling as well.

    Generation does not stop at eos, so that all prompts give the same number of tokens to compare.
    """
    prompts = list(prompts)
    if not prompts:
        return GeneratedTokens([], [], [])
    new_tokens = num_new_tokens(shape)
    rows = [prompt.encoder_ids or prompt.decoder_ids for prompt in (*prompts, *prompts[:num_sampled])]
    longest = max(map(len, rows))
    tokens_BS = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=model.device)
    mask_BS = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    own = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=new_tokens,
        pad_token_id=0 if own.pad_token_id is None else own.pad_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    with Progress("continuing prompts", new_tokens, unit="token") as progress, torch.inference_mode():
        sampler = LogitsProcessorList([_RowSampler(len(prompts), progress)])
        output_BS = model.generate(tokens_BS, attention_mask=mask_BS, logits_processor=sampler)
    model.generation_config = own
    new = output_BS[:, -new_tokens:].tolist()  # after the prompt, or after the decoder's start token
    return GeneratedTokens(prompts, new[: len(prompts)], new[len(prompts) :])


class _RowSampler(LogitsProcessor):
    """Samples the next token of all rows from `first` on, by making it the only possible one."""

    def __init__(self, first: int, progress: Progress):
        self._first, self._progress = first, progress
        self._warpers = (TemperatureLogitsWarper(TEMPERATURE), TopPLogitsWarper(TOP_P))
        self._generator = torch.Generator().manual_seed(SEED)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._progress.advance()
        sampled_BV = scores[self._first :].nan_to_num()  # the proof reports logits that are not numbers
        if len(sampled_BV):
            for warper in self._warpers:
                sampled_BV = warper(input_ids[self._first :], sampled_BV)
            chosen_B1 = torch.multinomial(sampled_BV.softmax(-1).cpu(), 1, generator=self._generator)
            only_BV = torch.full_like(sampled_BV, float("-inf")).scatter_(1, chosen_B1.to(scores.device), 0.0)
            scores = torch.cat((scores[: self._first], only_BV))
        return scores
