"""The stock model that is made of weights in memory computes what ours computes with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from shapes import shape_of
from torch import Tensor
from wide_weights import spread_weights

from zerokara.errors import RunError
from zerokara.huggingface import families, weight_rules
from zerokara.huggingface.families import stock_model_of
from zerokara.huggingface.proof import trained_logits
from zerokara.huggingface.weight_rules import WeightRule
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Prompt

SPECIAL = families.SpecialIds(bos=1, eos=2, pad=3)
ARCHITECTURES = sorted(families.FAMILIES)
SPREAD = 0.5


def shape_for(architecture: str, tied: bool = True) -> ModelShape:
    return replace(shape_of(201, architecture=architecture), tie_word_embeddings=tied)


def logits_of_both(shape: ModelShape, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Ours and the stock model's, for the same tokens [2, 9], and [2, 12] for an encoder."""
    generator = torch.Generator().manual_seed(3)
    tokens_BS = torch.randint(0, shape.vocab_size, (2, 9), generator=generator)
    read_BR = torch.randint(0, shape.vocab_size, (2, 12), generator=generator)
    stock = stock_model_of(shape, weights, SPECIAL)
    if not shape.traits.is_encoder_decoder:
        (ours,) = trained_logits(weights, shape, [[Prompt([], row) for row in tokens_BS.tolist()]])
        return ours, stock(tokens_BS).logits
    rows = zip(read_BR.tolist(), tokens_BS.tolist(), strict=True)
    (ours,) = trained_logits(weights, shape, [[Prompt(*row) for row in rows]])
    return ours, stock(input_ids=read_BR, decoder_input_ids=tokens_BS).logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_our_model(architecture: str, tied: bool) -> None:
    shape = shape_for(architecture, tied)
    ours, theirs = logits_of_both(shape, spread_weights(shape))
    assert ours.std() > SPREAD
    assert (ours - theirs).abs().max() < 1e-5


def test_a_broken_twin_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up projection exchanged."""
    shape = shape_for("llama")

    def swapped(rule: WeightRule) -> WeightRule:
        return replace(rule, hf=rule.hf[::-1]) if rule.transform is weight_rules.GATE_AND_UP else rule

    rules = [swapped(rule) for rule in families.rules_for(shape)]
    monkeypatch.setattr(families, "rules_for", lambda shape: rules)
    ours, theirs = logits_of_both(shape, spread_weights(shape))
    assert (ours - theirs).abs().max() > 1e-2


@pytest.mark.parametrize("architecture", ["gpt2", "t5"])
def test_training_is_not_disturbed(architecture: str) -> None:
    """The random state stays, and the parameters remain those of the module, which learn."""
    shape = shape_for(architecture, tied=False)
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in spread_weights(shape).items()}
    before = torch.get_rng_state()
    model = stock_model_of(shape, weights, SPECIAL)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(weight.requires_grad for weight in weights.values())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_weights_may_come_one_by_one_and_are_rounded() -> None:
    shape = shape_for("llama")
    model = stock_model_of(shape, iter(spread_weights(shape).items()), SPECIAL, dtype="bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_weights_that_do_not_fit_are_all_named() -> None:
    shape = shape_for("llama")
    weights = spread_weights(shape)
    left_out = [name for name in weights if name.endswith("layernorm.weight")][:2]
    with pytest.raises(RunError) as caught:
        stock_model_of(shape, {name: weight for name, weight in weights.items() if name not in left_out}, SPECIAL)
    assert all(name in str(caught.value) for name in left_out)
