"""Inference equals training: chats and prompts of step 7 have the ids of the export, and broken twins have not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from made_conversations import made_conversations
from toy_tokenizers import TrainToy, toy_lines
from transformers import AutoTokenizer

from zerokara.config.finetune_config import FinetuneConfig
from zerokara.examples.example_files import ExampleTokens
from zerokara.examples.preparation import prepare
from zerokara.huggingface import tokenizer_json, tokenizer_proof
from zerokara.tokenizer.encoder import Encoder


def edit_template(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8")
        assert old in source
        path.write_text(source.replace(old, new), encoding="utf-8")

    return edit


BROKEN: dict[str, Callable[[Path], None]] = {
    "a message may spell </s>": edit_template("< /s>", "</s>"),
    "a line end after a turn piece": edit_template('"<|user|>" + text', '"<|user|>\\n" + text'),
    "another end": edit_template('text + "</s>"', 'text + "<|end|>"'),
    "trimmed answers": edit_template('text + "</s>"', 'text|trim + "</s>"'),
    "no prompt for generation": edit_template("if add_generation_prompt", "if false"),
}


def prepared(encoder: Encoder, place: Path, examples: Iterable[dict[str, Any]], tokenizer: Any, encodes: bool) -> Any:
    """Prepare training examples with this tokenizer of the export."""
    data = place / "train.jsonl"
    lines = (json.dumps(example).replace("\\u0000", "0") + "\n" for example in examples)
    data.write_text("".join(lines), encoding="utf-8")
    config = FinetuneConfig(train_data=[str(data)], valid_fraction=0, output_prefix=str(place / "out" / "x"))
    return prepare(config, encoder, lambda: tokenizer, is_encoder_decoder=encodes, packed_length=9999, redo=True)


@pytest.mark.parametrize("encodes", [False, True], ids=["decoder", "encoder-decoder"])
def test_a_chat_is_held_to_what_was_trained(encodes: bool, train_toy: TrainToy, tmp_path: Path) -> None:
    encoder = Encoder(train_toy(vocab_size=560))
    conversations = ({"messages": each} for each in islice(made_conversations(encoder, toy_lines(50)), 60))
    tokenizer = tokenizer_proof.tokenizer_of_exports(encoder, encodes)
    files = prepared(encoder, tmp_path, conversations, tokenizer, encodes)
    trained = [json.loads(line) for line in files.train.texts_path.read_bytes().splitlines()]
    tokenizer_json.write(encoder, tmp_path, 64, encodes, files.chat_template)
    proof = tokenizer_proof.prove_chat(tmp_path, trained)
    assert proof.facts == {"compared": 60, "failures": 0} and not proof.faults, proof.faults
    for name, change in ({} if encodes else BROKEN).items():
        tokenizer_json.write(encoder, tmp_path, 64, encodes, files.chat_template)
        change(tmp_path)
        proof = tokenizer_proof.prove_chat(tmp_path, trained)
        assert "at token" in proof.faults[0], name
        assert name != "another end" or proof.facts["failures"] == 60, "after a first answer no prompt tells it"


KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "bpe, sentinels": {"model_type": "bpe", "extra_ids": 3},
    "dummy prefix": {"add_dummy_prefix": True},
    "no bytes, symbols": {"byte_fallback": False, "user_defined_symbols": ("<", "fox", "<sep>")},
    "nfkc": {"normalization_rule_name": "nmt_nfkc"},
}
NAMES = ("</s>", " </s> x", "a<unk>b", "<pad>\n", "<|user|>", "<extra_id_0>", "  <extra_id_1> y", "<|assistant|></s>")


def prompts() -> list[str]:
    lines = toy_lines(40)
    hostile = ["  two  spaces ", "a\n\n b\t", "e\u0301 ﬁ ①", "\u3000全角", "😀\u200d", "x\r\ny"]
    return [*lines, *hostile, *(line + name for line, name in zip(lines, NAMES, strict=False)), *NAMES]


@pytest.mark.parametrize("encodes", [False, True], ids=["decoder", "encoder-decoder"])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_those_of_the_exported_tokenizer(
    kind: str, encodes: bool, train_toy: TrainToy, tmp_path: Path
) -> None:
    encoder = Encoder(train_toy(**{"vocab_size": 580, **KINDS[kind]}))
    tokenizer_json.write(encoder, tmp_path, 9999, is_encoder_decoder=encodes)
    theirs = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False, local_files_only=True)
    end = "" if encodes else "\n"

    def differing(tokenizer: Any) -> list[str]:
        examples = ({"source": prompt, "target": "y"} for prompt in prompts())
        tokens = ExampleTokens(prepared(encoder, tmp_path, examples, tokenizer, encodes).train.prefix)
        assert len(tokens) == len(prompts())
        return [text for i, text in enumerate(prompts()) if theirs(text + end)["input_ids"] != tokens.prompt(i)]

    ours = tokenizer_proof.tokenizer_of_exports(encoder, encodes)
    assert not differing(ours)
    ours.split_special_tokens = True
    assert differing(ours), "the broken twin: names of control pieces as text"
