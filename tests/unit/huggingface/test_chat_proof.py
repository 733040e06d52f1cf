"""Inference equals training in a chat: what step 7 learned of its conversations, and broken twins of the export."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from made_conversations import made_conversations
from toy_tokenizers import TrainToy, toy_lines

from zerokara.config.finetune_config import FinetuneConfig
from zerokara.examples.preparation import prepare
from zerokara.huggingface import tokenizer_json, tokenizer_proof
from zerokara.tokenizer.encoder import Encoder


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


@pytest.mark.parametrize("encodes", [False, True], ids=["decoder", "encoder-decoder"])
def test_an_export_is_held_to_what_was_trained(encodes: bool, train_toy: TrainToy, tmp_path: Path) -> None:
    encoder = Encoder(train_toy(vocab_size=560))
    conversations = islice(made_conversations(encoder, toy_lines(50)), 60)
    data = tmp_path / "train.jsonl"
    lines = (json.dumps({"messages": messages}).replace("\\u0000", "0") + "\n" for messages in conversations)
    data.write_text("".join(lines), encoding="utf-8")
    config = FinetuneConfig(train_data=[str(data)], valid_fraction=0, output_prefix=str(tmp_path / "out" / "x"))
    tokenizer = tokenizer_proof.tokenizer_of_exports(encoder, encodes)
    files = prepare(config, encoder, lambda: tokenizer, is_encoder_decoder=encodes, packed_length=9999)
    trained = [json.loads(line) for line in files.train.texts_path.read_bytes().splitlines()]
    tokenizer_json.write(encoder, tmp_path, 64, encodes, files.chat_template)
    proof = tokenizer_proof.prove_chat(tmp_path, trained)
    assert proof.facts == {"compared": 60, "failures": 0} and not proof.faults, proof.faults
    for name, change in ({} if encodes else BROKEN).items():
        tokenizer_json.write(encoder, tmp_path, 64, encodes, files.chat_template)
        change(tmp_path)
        proof = tokenizer_proof.prove_chat(tmp_path, trained)
        assert "at token" in proof.faults[0], name
