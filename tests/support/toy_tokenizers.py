"""A toy corpus in several scripts, and toy tokenizers trained on it in the process."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.tokenizer import training
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.model_file import PieceType

ALPHABETS = {
    "en": "etaoinshrdlucm",
    "ja": "のはがをにとでた今日天気公園友達本行読歩会",
    "ko": "오늘날씨가좋아서공원에친구를만나책을",
    "ro": "aeiurnțșăâîclp",
}


def toy_lines(count: int = 600, seed: int = 1) -> list[str]:
    """Lines of made-up words in four scripts, frequent ones and rare ones; Japanese without spaces."""
    rng, lines = random.Random(seed), []
    frequent = ["the", "fox", "42", "2024", "dogs"]
    words = {
        language: ["".join(rng.choices(letters, k=rng.randint(2, 6))) for _ in range(150)]
        for language, letters in ALPHABETS.items()
    }
    words["en"] += frequent
    for _ in range(count):
        language = rng.choice(sorted(words))
        chosen = [words[language][min(int(rng.expovariate(0.03)), 149)] for _ in range(rng.randint(3, 12))]
        chosen += rng.choices(frequent, k=2) if language == "en" else []
        lines.append(("" if language == "ja" else " ").join(chosen) + rng.choice([".", "。", "!", "  ", ""]))
    return lines


def byte_ids(encoder: Encoder) -> set[int]:
    """The ids of the byte-fallback pieces, <0x00> to <0xFF>."""
    return {i for i, piece in enumerate(encoder.model.pieces) if piece.type is PieceType.BYTE}


TrainToy = Callable[..., Path]


def trainer(tmp_path_factory: pytest.TempPathFactory, corpus: list[str]) -> TrainToy:
    """Return a function that trains a tokenizer with some settings, once for each, and returns the model's path."""
    paths: dict[str, Path] = {}

    def train(lines: list[str] | None = None, *, again: bool = False, **settings: Any) -> Path:
        key = repr((lines, sorted(settings.items())))
        if key in paths and not again:
            return paths[key]
        folder = tmp_path_factory.mktemp("toy")
        sentences, paths[key] = folder / "sentences.txt", folder / "tokenizer.model"
        sentences.write_text("".join(f"{line}\n" for line in lines or corpus), encoding="utf-8", newline="\n")
        config = TokenizerConfig(**{"vocab_size": 520, "num_threads": 1, "character_coverage": 1.0, **settings})
        model, _ = training.train(config, sentences, folder, folder / "training.log")
        paths[key].write_bytes(model)
        return paths[key]

    return train


@pytest.fixture(scope="session")
def train_toy(tmp_path_factory: pytest.TempPathFactory) -> TrainToy:
    return trainer(tmp_path_factory, toy_lines())


@pytest.fixture(scope="session")
def toy(train_toy: TrainToy) -> Encoder:
    """A unigram tokenizer with the default settings."""
    return Encoder(train_toy())


@pytest.fixture(scope="session")
def toy_bpe(train_toy: TrainToy) -> Encoder:
    """A BPE tokenizer with sentinels."""
    return Encoder(train_toy(model_type="bpe", extra_ids=3))
