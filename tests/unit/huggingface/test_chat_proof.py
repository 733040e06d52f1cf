"""Inference equals training in a chat: made conversations, every kind of tokenizer, and broken twins."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from toy_tokenizers import TrainToy, toy_lines

from zerokara.examples import made_conversations
from zerokara.examples.chat_template import ChatTemplate, auto_template, checked
from zerokara.huggingface import chat_proof, tokenizer_json
from zerokara.tokenizer.encoder import Encoder

KINDS: dict[str, dict[str, Any]] = {
    "turn pieces": {},
    "bpe, sentinels": {"model_type": "bpe", "extra_ids": 3},
    "plain text": {"reserved_pieces": ()},
    "dummy prefix": {"add_dummy_prefix": True},
    "no bytes, symbols": {"byte_fallback": False, "user_defined_symbols": ("<", "fox", "<sep>")},
    "nfkc": {"normalization_rule_name": "nmt_nfkc"},
}
NAIVE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As most templates are: it leaves the names of control pieces in a message, which become these pieces."""


@pytest.fixture
def encoder(train_toy: TrainToy) -> Encoder:
    return Encoder(train_toy(vocab_size=560))


def proved(encoder: Encoder, template: ChatTemplate, folder: Path, wanted: int = 300) -> chat_proof.ChatProof:
    return chat_proof.prove(encoder, template, folder, toy_lines(50), [], wanted)


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_every_kind_of_tokenizer_gives_the_ids_of_training(
    settings: dict[str, Any], train_toy: TrainToy, tmp_path: Path
) -> None:
    encoder = Encoder(train_toy(**{"vocab_size": 580, **settings}))
    template = auto_template(encoder)
    tokenizer_json.write(encoder, tmp_path, 64, chat_template=template.source)
    proof = proved(encoder, template, tmp_path)
    assert proof.ok and proof.made >= 300 and not proof.refused and not proof.ties, str(proof)


def test_an_encoder_decoder_too(train_toy: TrainToy, tmp_path: Path) -> None:
    encoder = Encoder(train_toy(vocab_size=560, extra_ids=3))
    template = auto_template(encoder, is_encoder_decoder=True)
    tokenizer_json.write(encoder, tmp_path, 64, is_encoder_decoder=True, chat_template=template.source)
    assert proved(encoder, template, tmp_path).ok


def test_what_training_refuses_is_counted_and_not_compared(encoder: Encoder, tmp_path: Path) -> None:
    template = checked(NAIVE, "", encoder)
    tokenizer_json.write(encoder, tmp_path, 64, chat_template=template.source)
    proof = proved(encoder, template, tmp_path)
    assert proof.ok and proof.refused > 50
    other = checked(NAIVE.replace("<|end|>'", "</s>'"), "", encoder)
    assert not proved(encoder, other, tmp_path).ok, "the exported template has another end"


def test_too_few_conversations_are_no_proof(encoder: Encoder, tmp_path: Path) -> None:
    template = checked(NAIVE.replace("m.content }}", "m.content if m.content|length < 12 else 1 // 0 }}"), "", encoder)
    tokenizer_json.write(encoder, tmp_path, 64, chat_template=template.source)
    proof = proved(encoder, template, tmp_path)
    assert not proof.num_failures and not proof.ok and "fewer" in str(proof)


def edit_json(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text(encoding="utf-8"))
        change(content)
        path.write_text(json.dumps(content), encoding="utf-8")

    return edit


def edit_template(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8")
        assert old in source
        path.write_text(source.replace(old, new), encoding="utf-8")

    return edit


def strip_before_turns(content: dict[str, Any]) -> None:
    for token in content["added_tokens"]:
        token["lstrip"] = token["content"].startswith("<|")


def merge_less(content: dict[str, Any]) -> None:
    content["model"]["vocab"][300:] = [[piece, score - 9] for piece, score in content["model"]["vocab"][300:]]


BROKEN: dict[str, Callable[[Path], None]] = {
    "a message may spell </s>": edit_template("< /s>", "</s>"),
    "a line end after a turn piece": edit_template('"<|user|>" + text', '"<|user|>\\n" + text'),
    "another end": edit_template('text + "</s>"', 'text + "<|end|>"'),
    "trimmed answers": edit_template('text + "</s>"', 'text|trim + "</s>"'),
    "no prompt for generation": edit_template("if add_generation_prompt", "if false"),
    "spaces before a turn go": edit_json("tokenizer.json", strip_before_turns),
    "other scores": edit_json("tokenizer.json", merge_less),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_broken_export_is_found(change: Callable[[Path], None], encoder: Encoder, tmp_path: Path) -> None:
    template = auto_template(encoder)
    tokenizer_json.write(encoder, tmp_path, 64, chat_template=template.source)
    change(tmp_path)
    proof = proved(encoder, template, tmp_path, wanted=50)
    assert not proof.ok and proof.failures and "at token" in str(proof)


def test_the_conversations_made_are_hostile(encoder: Encoder) -> None:
    made = list(islice(made_conversations.made(encoder, ["a line of the user's"]), 2000))
    assert made == list(islice(made_conversations.made(encoder, ["a line of the user's"]), 2000))
    exchanges = {sum(message["role"] == "assistant" for message in messages) for messages in made}
    assert exchanges == set(range(1, 7))
    assert {messages[0]["role"] for messages in made} == {"user", "system"}
    text = "\0".join(message["content"] for messages in made for message in messages)
    names = [encoder.piece(i) for i in encoder.control_ids]
    assert all(name in text for name in [*names, "a line of the user's", "{{ eos_token }}", "\nassistant:\n"])
