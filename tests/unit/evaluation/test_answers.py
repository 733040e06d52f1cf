"""Prompts → ids of the model's own tokenizer → answers as text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from shapes import shape_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from wide_weights import spread_weights

from zerokara.errors import RunError
from zerokara.evaluation import answers
from zerokara.huggingface import families
from zerokara.huggingface.families import stock_model_of
from zerokara.huggingface.generation import generate

WORDS = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    *(f"w{number}" for number in range(60)),
    *(chr(each) for each in range(33, 127)),
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


def tokenizer_of(template: str = "$A", chat_template: str | None = None) -> Any:
    """A tokenizer of words that white space separates; `template` is what it adds to a text."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = chat_template
    return made


def prompt_ids(tokenizer: Any, prompt: Any, is_encoder_decoder: bool = False) -> list[str]:
    return [WORDS[each] for each in answers.prompt_ids(tokenizer, prompt, is_encoder_decoder, [2])]


def test_a_prompt_is_encoded_as_the_tokenizer_does_but_a_decoder_is_to_go_on() -> None:
    assert prompt_ids(tokenizer_of(), "w1 w2") == ["w1", "w2"]
    assert prompt_ids(tokenizer_of("<s> $A"), "w1 w2") == ["<s>", "w1", "w2"]
    assert prompt_ids(tokenizer_of("$A </s>"), "w1 w2") == ["w1", "w2"]
    assert prompt_ids(tokenizer_of("$A </s>"), "w1 w2", is_encoder_decoder=True) == ["w1", "w2", "</s>"]


def test_a_control_token_that_a_prompt_spells_is_the_token_as_in_fine_tuning() -> None:
    assert prompt_ids(tokenizer_of(), "w1 </s> w2") == ["w1", "</s>", "w2"]
    for template in ("$A", "$A </s>"):
        assert prompt_ids(tokenizer_of(template), "w1 </s>") == ["w1", "</s>"]
        assert prompt_ids(tokenizer_of("<s> " + template), "w1 </s> </s>") == ["<s>", "w1", "</s>", "</s>"]


def test_a_conversation_goes_through_the_template() -> None:
    turns = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w2"},
        {"role": "user", "content": "w3"},
    ]
    expected = ["u", "w1", "</s>", "a", "w2", "</s>", "u", "w3", "</s>", "a"]
    assert prompt_ids(tokenizer_of(chat_template=TEMPLATE), turns) == expected
    with pytest.raises(RunError, match="chat template"):
        prompt_ids(tokenizer_of(), turns)


def test_end_tokens_are_the_models() -> None:
    def ends(of_model: Any, of_tokenizer: Any = 2) -> list[int]:
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=of_model))
        return answers.end_ids(model, SimpleNamespace(eos_token_id=of_tokenizer))

    assert ends(7) == [7] and ends([7, 8]) == [7, 8] and ends(None) == [2]
    with pytest.raises(RunError, match="end token"):
        ends(None, None)


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_answers_are_the_generated_text(architecture: str) -> None:
    shape = shape_of(len(WORDS), architecture=architecture)
    special = families.SpecialIds(bos=1, eos=2, pad=0)
    model, tokenizer = stock_model_of(shape, spread_weights(shape), special), tokenizer_of("$A </s>")
    prompts = ["w1 w2 w3", "w4", "w5 w6"]
    found = answers.answer(model, tokenizer, prompts, max_new_tokens=6)
    ids = [answers.prompt_ids(tokenizer, prompt, architecture == "t5", [2]) for prompt in prompts]
    expected = generate(model, ids, max_new_tokens=6, eos_id=2, pad_id=0)
    assert found is not None and expected is not None
    assert found.outputs == [tokenizer.decode(each.ids, skip_special_tokens=True).strip() for each in expected]
    assert found.stopped == [each.stopped for each in expected]
    assert len(set(found.outputs)) > 1


def test_the_limit_follows_the_longest_expected_answer() -> None:
    assert answers.num_tokens_allowed(tokenizer_of(), ["w1", "w1 w2 w3 w4", "w5 w6"]) == 5 + 1
    assert answers.num_tokens_allowed(tokenizer_of(), []) == 3


def test_a_prompt_longer_than_the_context_is_not_answered() -> None:
    shape = shape_of(len(WORDS), architecture="llama")
    model = stock_model_of(shape, spread_weights(shape), families.SpecialIds(bos=1, eos=2, pad=0))
    long, full = (" ".join(["w1"] * length) for length in (shape.seq_len + 1, shape.seq_len))
    found = answers.answer(model, tokenizer_of(), ["w1", long, "w2"], max_new_tokens=3)
    assert found is not None and found.num_too_long == 1
    assert found.outputs[1] == "" and not found.stopped[1]
    to_the_end = answers.answer(model, tokenizer_of(), [full], max_new_tokens=3)
    assert to_the_end is not None and to_the_end.num_too_long == 0 and to_the_end.outputs[0]
    assert [found.outputs[0], found.outputs[2]] == [
        each.outputs[0]
        for prompt in ("w1", "w2")
        if (each := answers.answer(model, tokenizer_of(), [prompt], max_new_tokens=3))
    ]
