"""transformers 4.57 reads an export as transformers 5 does: ids, logits, greedy tokens, the model card's snippet."""

from collections.abc import Callable
from typing import Any

import pytest
import rounding
import torch
from clients.client_exports import DECODERS, EXPORTS, NUM_SENTINELS, Exports, ask, changed_copy, joined

SPREAD = 0.5
"""Least standard deviation of logits at which such a tolerance means anything."""


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.pop(key)


def by_the_new_name(values: dict[str, Any]) -> None:
    values["extra_special_tokens"] = values.pop("additional_special_tokens")


BROKEN = {
    "no base of the rotary positions": ("llama", "config.json", without("rope_theta")),
    "no base that is the others' default": ("mixtral", "config.json", without("rope_theta")),
    "no number of experts": ("qwen3_moe", "config.json", without("num_experts")),
    "no names of the inputs": ("gpt2", "tokenizer_config.json", without("model_input_names")),
    "no side of the padding": ("llama-bpe", "tokenizer_config.json", without("padding_side")),
    "sentinels by their new name": ("t5", "tokenizer_config.json", by_the_new_name),
}


@pytest.fixture(scope="module")
def old(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What transformers 4 says of each export, and of copies that lack one older name, by what is missing."""
    folder = tmp_path_factory.mktemp("old")
    for name in EXPORTS:
        (folder / name).symlink_to(exports[name])
    for what, (name, file, change) in BROKEN.items():
        changed_copy(exports[name], folder / what, file, change)
    answers = ask("with_transformers.py", "transformers4", folder, exports.questions)
    assert answers["version"] == "4.57.6"
    return answers


@pytest.mark.parametrize("name", EXPORTS)
def test_ids_are_those_of_training(old: dict[str, Any], exports: Exports, name: str) -> None:
    assert "failed" not in old[name], old[name]
    encoder, lines = exports.encoder(name), exports.questions["lines"]
    assert len(lines) >= 200
    ours = [ids.tolist() for ids in encoder.encode_many(lines)]
    assert old[name]["ids"] == ours
    assert old[name]["decoded"] == [encoder.decode(ids) for ids in ours]
    assert old[name]["keys"] == ["attention_mask", "input_ids"], "token_type_ids are added to GPT-2's embeddings"
    if name not in DECODERS:
        a, b = encoder.encode("a").tolist(), encoder.encode(" b").tolist()
        assert old[name]["marks"] == [[*a, mark, *b] for mark in encoder.sentinel_ids]
        assert len(encoder.sentinel_ids) == NUM_SENTINELS


@pytest.mark.parametrize("name", DECODERS)
def test_conversations_are_as_trained(old: dict[str, Any], new: dict[str, Any], exports: Exports, name: str) -> None:
    segments = [exports.segments(name, messages) for messages in exports.questions["conversations"]]
    assert len(segments) == 40
    ours = [[joined(each), joined(each[:-1])] for each in segments]
    assert old[name]["conversations"] == ours and new[name]["conversations"] == ours


@pytest.mark.parametrize("name", EXPORTS)
def test_logits_and_greedy_tokens_are_equal(old: dict[str, Any], new: dict[str, Any], name: str) -> None:
    was, now = old[name], new[name]
    assert (was["class"], was["saved_as"]) == (now["class"], now["saved_as"])
    assert was["saved_as"] == "torch.bfloat16"
    assert torch.tensor(now["logits"]).std() > SPREAD
    rounding.assert_same_tensor(torch.tensor(was["logits"]), torch.tensor(now["logits"]))
    assert was["greedy"] == now["greedy"]


@pytest.mark.parametrize("name", DECODERS)
def test_a_padded_batch_goes_on_as_each_prompt_alone(old: dict[str, Any], new: dict[str, Any], name: str) -> None:
    for answers in (old[name], new[name]):
        assert answers["greedy_in_a_batch"] == [tokens[-12:] for tokens in answers["greedy"]]


@pytest.mark.parametrize("name", EXPORTS)
def test_the_cards_snippet_runs(old: dict[str, Any], new: dict[str, Any], name: str) -> None:
    for answers in (old[name], new[name]):
        said = answers["snippet"]
        assert "Error" not in said.split(":")[0], said
        # A decoder's text begins with the prompt; what fills spans names them.
        assert said.startswith("the model reads") if name in DECODERS else said.strip(), said


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_twin_is_seen(old: dict[str, Any], new: dict[str, Any], what: str) -> None:
    """Without the older name the client goes wrong; so the comparisons above can fail."""
    found, expected = old[what], new[BROKEN[what][0]]
    if "failed" in found:  # loudly
        return
    off = rounding.tensor_times_tolerance(torch.tensor(found["logits"]), torch.tensor(expected["logits"]))
    assert (
        off > rounding.BROKEN
        or found["keys"] != expected["keys"]
        or found["greedy_in_a_batch"] != expected["greedy_in_a_batch"]
    ), off
