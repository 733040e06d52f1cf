"""A toy corpus in several scripts, and toy tokenizers trained on it in the process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zerokara.config import TokenizerConfig
from zerokara.tokenizer import training
from zerokara.tokenizer.encoder import Encoder

WORDS = {
    "en": "the quick brown fox jumps over lazy dogs while seven wizards quietly box and play with 42 apples".split(),
    "ja": "今日 は とても よい 天気 です ので 、 公園 まで 歩いて 行きました 。 そこで 友達 に 会い 、 本 を 読みました".split(),
    "ko": "오늘 날씨가 좋아서 공원에 갔습니다 친구를 만나 함께 책을 읽고 커피를 마셨어요".split(),
    "ro": "această țară are munți înalți și văi adânci unde oamenii cântă în fiecare seară".split(),
}


def toy_lines(count: int = 600, seed: int = 1) -> list[str]:
    """Lines of words in four languages; Japanese without spaces."""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        language = rng.choice(sorted(WORDS))
        words = [rng.choice(WORDS[language]) for _ in range(rng.randint(3, 15))]
        lines.append(("" if language == "ja" else " ").join(words) + rng.choice([".", "。", "!", "  ", ""]))
    return lines


TrainToy = Callable[..., Path]


@pytest.fixture(scope="session")
def train_toy(tmp_path_factory: pytest.TempPathFactory) -> TrainToy:
    """Train a toy tokenizer with the settings given; gives the path of its model."""

    def train(lines: list[str] | None = None, **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp("toy")
        sentences = folder / "sentences.txt"
        sentences.write_text("".join(f"{line}\n" for line in lines or toy_lines()), encoding="utf-8", newline="\n")
        config = TokenizerConfig(**{"vocab_size": 520, "num_threads": 1, "character_coverage": 1.0, **settings})
        made = training.train(config, sentences, folder, folder / "training.log")
        path = folder / "tokenizer.model"
        path.write_bytes(made.model)
        return path

    return train


@pytest.fixture(scope="session")
def toy(train_toy: TrainToy) -> Encoder:
    """A unigram tokenizer with the default settings."""
    return Encoder(train_toy())


@pytest.fixture(scope="session")
def toy_bpe(train_toy: TrainToy) -> Encoder:
    """A BPE tokenizer with sentinels."""
    return Encoder(train_toy(model_type="bpe", extra_ids=3))
