"""The proof of a model: on how many tokens it is compared, and what counts as the same greedy token."""

from dataclasses import replace

import pytest
import torch

from zerokara.base.errors import RunError
from zerokara.config.data import SampleLengths
from zerokara.huggingface import proof
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Causal, Prompt

SMALL = ModelShape("llama", 4, 256, 4, 4, 704, 256, 8000, True, 1e4, 1e-5, 0.02)
BILLION = ModelShape("llama", 22, 2048, 32, 4, 5632, 2048, 32000, False, 1e4, 1e-5, 0.02)


def test_a_large_model_is_proved_on_fewer_tokens() -> None:
    def positions(shape: ModelShape) -> int:
        made = Causal(SampleLengths(raw=shape.seq_len, input=shape.seq_len, target=shape.seq_len, overlap=1))
        found = [text.decoder_ids for text in proof.windows([range(7, 5007)], shape, made)]
        assert len({len(ids) for ids in found}) == 1 and found[0] == list(range(7, 7 + len(found[0])))
        assert proof.windows([[1, 2], [3]], shape, made)[0].decoder_ids[:4] == [1, 2, 3, 1]
        with pytest.raises(RunError, match="no text"):
            proof.windows([[1]], shape, made)
        return len(found) * len(found[0])

    assert positions(SMALL) == proof.MAX_POSITIONS > positions(BILLION) > proof.MIN_POSITIONS
    assert positions(replace(SMALL, vocab_size=500_000)) < 64, "logits take memory"
    assert proof.num_new_tokens(SMALL) > proof.num_new_tokens(BILLION) > proof.MIN_NEW_TOKENS


def test_each_greedy_token_is_compared_with_our_arg_max() -> None:
    # After the prompt [8, 9] the arg max is 1, then 2, then 0 and 2 alike.
    logits_BSV = torch.tensor([[[9.0, 0, 0], [0, 1, 0], [0, 0, 1], [1.0, 0, 1 - 1e-4]]])
    prompts, tied_BS = [Prompt([], [8, 9])], torch.zeros(1, 4, dtype=torch.bool)
    assert proof.compare_greedy(prompts, [[1, 2, 0]], logits_BSV, tied_BS, 2e-4) == (0, [])
    assert proof.compare_greedy(prompts, [[1, 2, 2]], logits_BSV, tied_BS, 2e-4) == (1, [])
    ties, faults = proof.compare_greedy(prompts, [[1, 0, 1]], logits_BSV, tied_BS, 2e-4)
    assert ties == 0 and len(faults) == 1 and "token 1" in faults[0]
    tied_BS[0, 2] = True
    assert proof.compare_greedy(prompts, [[1, 0, 1]], logits_BSV, tied_BS, 2e-4) == (0, [])
