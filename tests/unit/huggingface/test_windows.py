"""The texts of the proof: how many tokens a model is compared on, and that each window keeps its logits."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import Tensor

from zerokara.huggingface import logit_proof
from zerokara.huggingface.continuations import GeneratedTokens, num_new_tokens
from zerokara.huggingface.windows import Windows, within_budget
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Prompt

SMALL = ModelShape("llama", 4, 256, 4, 4, 704, 256, 8000, True, 1e4, 1e-5, 0.02)
BILLION = ModelShape("llama", 22, 2048, 32, 4, 5632, 2048, 32000, False, 1e4, 1e-5, 0.02)


@pytest.mark.parametrize(
    ("shape", "positions", "new_tokens"),
    [
        (SMALL, 2048, 60),
        (BILLION, 136, 21),  # 0.3e12 FLOPs / (2 · 1.1e9 weights)
        (replace(BILLION, num_layers=200), 128, 20),
        (replace(SMALL, vocab_size=500_000), 63, 60),  # 32e6 logits / 500,096 rows
        (replace(SMALL, seq_len=20), 2048, 19),
    ],
)
def test_a_large_model_is_compared_on_fewer_tokens(shape: ModelShape, positions: int, new_tokens: int) -> None:
    windows = within_budget([range(7, 5007)], shape)
    assert windows.positions == positions and num_new_tokens(shape) == new_tokens
    assert list(chain.from_iterable(windows.tokens)) == list(range(7, 7 + positions))
    assert max(map(len, windows.tokens)) == min(shape.seq_len, positions)


def test_each_window_keeps_its_own_logits_whatever_stands_beside_it() -> None:
    windows = Windows([[1, 2, 3], list(range(900)), [4], [5, 6], list(range(700))])
    batches = []

    def model(tokens_BS: Tensor) -> Tensor:
        batches.append(tuple(tokens_BS.shape))
        return tokens_BS[..., None].float()

    found = windows.through(model, "test")
    assert [part.flatten().int().tolist() for part in found] == windows.tokens
    assert batches == [(1, 900), (1, 700), (3, 3)]


def test_the_first_positions_are_cut_from_the_front() -> None:
    windows = Windows([[1, 2, 3], [4, 5], [6]])
    assert windows.first(4).tokens == [[1, 2, 3], [4]] and windows.first(3).tokens == [[1, 2, 3]]
    assert windows.first(99) == windows


def test_each_greedy_token_is_compared_with_our_arg_max() -> None:
    # After the prompt [8, 9] the arg max is 1, then 2, then 0 and 2 alike.
    logits = torch.tensor([[9.0, 0, 0], [0, 1, 0], [0, 0, 1], [1.0, 0, 1 - 1e-4]])
    generated = GeneratedTokens(prompts=[Prompt([], [8, 9])], greedy=[[1, 2, 0]], sampled=[])
    assert logit_proof.compare_greedy(generated, [logits], 2e-4) == (0, [])
    assert logit_proof.compare_greedy(replace(generated, greedy=[[1, 2, 2]]), [logits], 2e-4) == (1, [])
    ties, faults = logit_proof.compare_greedy(replace(generated, greedy=[[1, 0, 1]]), [logits], 2e-4)
    assert ties == 0 and len(faults) == 1 and "token 1" in faults[0]
