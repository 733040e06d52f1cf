"""The stock model that is made of weights in memory computes what ours computes with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from shapes import shape_of
from wide_weights import spread_weights

from zerokara.errors import RunError
from zerokara.huggingface import families
from zerokara.huggingface.families import stock_model_of
from zerokara.huggingface.proof import trained_logits
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Prompt

SPECIAL = families.SpecialIds(bos=1, eos=2, pad=3)


def shape_for(architecture: str, tied: bool = True) -> ModelShape:
    return replace(shape_of(201, architecture=architecture), tie_word_embeddings=tied)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", sorted(families.FAMILIES))
def test_logits_are_those_of_our_model(architecture: str, tied: bool) -> None:
    shape, generator = shape_for(architecture, tied), torch.Generator().manual_seed(3)
    tokens_BS = torch.randint(0, shape.vocab_size, (2, 9), generator=generator)
    encoder_BR = torch.randint(0, shape.vocab_size, (2, 12), generator=generator)
    weights, rows = spread_weights(shape), tokens_BS.tolist()
    stock = stock_model_of(shape, iter(weights.items()), SPECIAL)
    if shape.traits.is_encoder_decoder:
        texts = [Prompt(*pair) for pair in zip(encoder_BR.tolist(), rows, strict=True)]
        theirs = stock(input_ids=encoder_BR, decoder_input_ids=tokens_BS).logits
    else:
        texts, theirs = [Prompt([], row) for row in rows], stock(tokens_BS).logits
    (ours,) = trained_logits(weights, shape, [texts])
    assert ours.std() > 0.5
    assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("architecture", ["gpt2", "t5"])
def test_training_is_not_disturbed(architecture: str) -> None:
    """The random state stays, and the parameters remain those of the module, which learn."""
    shape = shape_for(architecture, tied=False)
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in spread_weights(shape).items()}
    before = torch.get_rng_state()
    model = stock_model_of(shape, weights, SPECIAL, dtype="bf16")
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(weight.requires_grad for weight in weights.values())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_weights_that_do_not_fit_are_all_named() -> None:
    shape = shape_for("llama")
    weights = spread_weights(shape)
    left_out = [name for name in weights if name.endswith("layernorm.weight")][:2]
    with pytest.raises(RunError) as caught:
        stock_model_of(shape, {name: weight for name, weight in weights.items() if name not in left_out}, SPECIAL)
    assert all(name in str(caught.value) for name in left_out)
