"""Batched greedy generation is that of each prompt alone, in every family; the model for it is made of weights."""

from functools import cache
from typing import Any

import pytest
import torch
from shapes import shape_of
from torch import Tensor
from wide_weights import spread_weights

from zerokara.base.errors import RunError
from zerokara.huggingface import families, generation
from zerokara.huggingface.families import stock_model_of
from zerokara.huggingface.generation import Generated, generate

SPECIAL = families.SpecialIds(bos=1, eos=2, pad=3)
LENGTHS = (3, 17, 7, 12, 1, 16, 7)
NEW_TOKENS = 12
PADDED = generation.padded


@cache
def model_of(architecture: str) -> Any:
    shape = shape_of(201, architecture=architecture)
    return stock_model_of(shape, spread_weights(shape), SPECIAL)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, 200, (length,), generator=generator).tolist() for length in LENGTHS]


def generated(architecture: str, batch: list[list[int]], *ends: int, **more: Any) -> list[Generated]:
    settings = {"max_new_tokens": NEW_TOKENS, "pad_id": SPECIAL.pad, **more}
    return generate(model_of(architecture), batch, end_ids=ends or [SPECIAL.eos], **settings)


@pytest.mark.parametrize("architecture", sorted(families.FAMILIES))
def test_a_batch_gives_what_each_prompt_gives_alone(architecture: str) -> None:
    end = generated(architecture, prompts())[1].ids[4]  # as end token it ends some rows before others
    together = generated(architecture, prompts(), end)
    assert together == [generated(architecture, [prompt], end)[0] for prompt in prompts()]
    assert together[1].stopped and len(together[1].ids) < NEW_TOKENS
    assert any(not each.stopped and len(each.ids) == NEW_TOKENS for each in together)
    assert not any(end in each.ids for each in together)


@pytest.mark.parametrize(
    ("architecture", "harm"), [("llama", "side"), ("gpt2", "side"), ("llama", "mask"), ("t5", "mask")]
)
def test_wrong_padding_is_found(architecture: str, harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rows: list[list[int]], pad_id: int, left: bool) -> tuple[Tensor, Tensor]:
        tokens_BS, mask_BS = PADDED(rows, pad_id, left and harm != "side")
        return tokens_BS, torch.ones_like(mask_BS) if harm == "mask" else mask_BS

    alone = [generated(architecture, [prompt])[0] for prompt in prompts()]
    monkeypatch.setattr(generation, "padded", wrong)
    assert generated(architecture, prompts()) != alone


def test_a_limit_cuts_and_several_tokens_end() -> None:
    whole = generated("llama", prompts())
    cut = generated("llama", prompts(), max_new_tokens=3)
    assert [each.ids for each in cut] == [each.ids[:3] for each in whole]
    free = whole[0].ids
    assert generated("llama", prompts(), 999, free[3])[0] == Generated(free[: free.index(free[3])], True)


def test_the_models_own_settings_have_no_effect_and_come_back() -> None:
    model, expected = model_of("llama"), generated("llama", prompts())
    own = model.generation_config
    own.repetition_penalty, own.min_new_tokens = 5.0, 3
    try:
        assert generated("llama", prompts()) == expected
        assert model.generation_config is own
    finally:
        own.repetition_penalty = own.min_new_tokens = None


def test_batches_keep_to_their_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, sizes = generated("llama", prompts()), list[tuple[int, ...]]()

    def recorded(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        tokens_BS, mask_BS = PADDED(*arguments, **named)
        sizes.append(tuple(tokens_BS.shape))
        return tokens_BS, mask_BS

    monkeypatch.setattr(generation, "padded", recorded)
    monkeypatch.setattr(generation, "MAX_BATCH_SIZE", 3)
    assert generated("llama", prompts()) == expected
    assert [size for size, _ in sizes] == [3, 3, 1]
    sizes.clear()
    monkeypatch.setattr(generation, "BATCH_TOKENS", 60)
    assert generated("llama", prompts()) == expected
    assert all(size * (longest + NEW_TOKENS) <= 60 for size, longest in sizes) and len(sizes) > 2


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_no_row_goes_beyond_the_last_position(architecture: str) -> None:
    """The context length is 32: there is room for one token, which is never read, for three, and for all; learned
    positions fail beyond it."""
    batch = [list(range(4, 4 + length)) for length in (32, 30, 5, 30)]
    found = generated(architecture, batch, 999)
    assert [len(each.ids) for each in found] == [1, 3, NEW_TOKENS, 3]
    assert found == [generated(architecture, [prompt], 999)[0] for prompt in batch]


@pytest.mark.parametrize("bad", [[], list(range(4, 37))], ids=["empty", "too long"])
def test_a_prompt_that_leaves_no_room_is_an_error(bad: list[int]) -> None:
    with pytest.raises(RunError, match=f"prompt 1 has {len(bad)} tokens"):
        generated("llama", [[5], bad])


@pytest.mark.parametrize("architecture", ["gpt2", "t5"])
def test_training_is_not_disturbed(architecture: str) -> None:
    """The random state stays, and the parameters remain those of the module, which learn."""
    shape = shape_of(201, architecture=architecture)
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in spread_weights(shape).items()}
    before = torch.get_rng_state()
    model = stock_model_of(shape, weights, SPECIAL, dtype="bf16")
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(weight.requires_grad for weight in weights.values())
    assert not any(parameter.requires_grad for parameter in model.parameters())
