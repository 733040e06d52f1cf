"""A small tokenizer and a small corpus, made in the process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sentencepiece

from zerokara.config import PretrainConfig

SENTENCE = "the sea ice melts in spring and 春 の 海 終日 のたり かな ¡olé! don't stop, <s> </s> ends here"


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents of one to forty lines."""
    random = Random(seed)

    def line() -> str:
        return " ".join(random.choices(SENTENCE.split(), k=random.randint(0, 12)))

    return [f"{i} " + "\n".join(line() for _ in range(random.randint(1, 40))) for i in range(count)]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts(200) for line in text.split("\n") if line),
        model_prefix=str(prefix), vocab_size=400, byte_fallback=True, pad_id=3, user_defined_symbols=["\n"],
        normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False, num_threads=1,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return prefix.with_suffix(".model")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """300 documents as JSON lines, and some bad lines among them."""
    lines = [json.dumps({"text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts(300))]
    lines[50:50] = ["{broken", ""]
    lines[200:200] = ['{"text": ""}']
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def make_config(tmp_path: Path, model_path: Path, corpus: Path) -> Callable[..., PretrainConfig]:
    """A configuration for the corpus; settings may be given."""

    def make(**settings: Any) -> PretrainConfig:
        values = {
            "input_jsonl": [str(corpus)],
            "input_tokenizer_file": str(model_path),
            "output_prefix": str(tmp_path / "out" / "tokens"),
            "num_workers": 1,
            "txt_document": "line",
        }
        return PretrainConfig(**(values | settings))

    return make
