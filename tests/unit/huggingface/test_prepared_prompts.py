"""The prompts of prepared examples are, id for id, what the exported tokenizer gives for the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toy_tokenizers import TrainToy, toy_lines
from transformers import AutoTokenizer

from zerokara.config.finetune_config import FinetuneConfig
from zerokara.examples.example_files import ExampleTokens
from zerokara.examples.preparation import prepare
from zerokara.huggingface import tokenizer_json, tokenizer_proof
from zerokara.tokenizer.encoder import Encoder

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
    tokenizer_json.write(encoder, tmp_path, 256, is_encoder_decoder=encodes)
    theirs = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False, local_files_only=True)
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"source": x, "target": "y"}) + "\n" for x in prompts()), encoding="utf-8")
    config = FinetuneConfig(train_data=[str(data)], valid_fraction=0, output_prefix=str(tmp_path / "out" / "x"))

    def differing(tokenizer: Any) -> list[str]:
        files = prepare(config, encoder, lambda: tokenizer, is_encoder_decoder=encodes, packed_length=256, redo=True)
        tokens, end = ExampleTokens(files.train.prefix), "" if encodes else "\n"
        assert len(tokens) == len(prompts())
        return [x for i, x in enumerate(prompts()) if theirs(x + end)["input_ids"] != tokens.prompt(i)]

    ours = tokenizer_proof.tokenizer_of_exports(encoder, encodes)
    assert not differing(ours)
    ours.split_special_tokens = True
    assert differing(ours), "the broken twin: names of control pieces as text"
