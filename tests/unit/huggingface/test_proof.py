"""The proof of a model: on how many tokens it is compared, and what counts as the same greedy token."""

from dataclasses import replace

import pytest
import torch

from zerokara.config.data import SampleLengths
from zerokara.errors import RunError
from zerokara.huggingface import proof
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Causal, Prompt

SMALL = ModelShape("llama", 4, 256, 4, 4, 704, 256, 8000, True, 1e4, 1e-5, 0.02)
BILLION = ModelShape("llama", 22, 2048, 32, 4, 5632, 2048, 32000, False, 1e4, 1e-5, 0.02)


@pytest.mark.parametrize(
    ("shape", "rows", "positions", "new_tokens"),
    [
        (SMALL, 8, 256, 60),
        (BILLION, 1, 136, 21),  # 0.3e12 FLOPs / (2 · 1.1e9 weights)
        (replace(BILLION, num_layers=200), 1, 128, 20),
        (replace(SMALL, vocab_size=500_000), 1, 63, 60),  # 32e6 logits / 500,096 rows
        (replace(SMALL, seq_len=20), 102, 20, 19),
    ],
)
def test_a_large_model_is_proved_on_fewer_tokens(shape: ModelShape, rows: int, positions: int, new_tokens: int) -> None:
    made = Causal(SampleLengths(raw=shape.seq_len, input=shape.seq_len, target=shape.seq_len, overlap=1))
    found = [text.decoder_ids for text in proof.windows([range(7, 5007)], shape, made)]
    assert len(found) == rows and {len(ids) for ids in found} == {positions}
    assert found[-1] == list(range(7, 5007))[(rows - 1) * (shape.seq_len + 1) :][:positions]
    assert proof.num_new_tokens(shape) == new_tokens
    assert proof.windows([[1, 2], [3]], shape, made)[0].decoder_ids[:4] == [1, 2, 3, 1]
    with pytest.raises(RunError, match="no text"):
        proof.windows([[1]], shape, made)


def test_each_greedy_token_is_compared_with_our_arg_max() -> None:
    # After the prompt [8, 9] the arg max is 1, then 2, then 0 and 2 alike.
    logits_BSV = torch.tensor([[[9.0, 0, 0], [0, 1, 0], [0, 0, 1], [1.0, 0, 1 - 1e-4]]])
    prompts = [Prompt([], [8, 9])]
    assert proof.compare_greedy(prompts, [[1, 2, 0]], logits_BSV, 2e-4) == (0, [])
    assert proof.compare_greedy(prompts, [[1, 2, 2]], logits_BSV, 2e-4) == (1, [])
    ties, faults = proof.compare_greedy(prompts, [[1, 0, 1]], logits_BSV, 2e-4)
    assert ties == 0 and len(faults) == 1 and "token 1" in faults[0]
