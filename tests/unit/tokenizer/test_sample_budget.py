"""The plan of a training: how much text, how much memory, and that this is what the training then takes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from configs import fault_of
from corpus_files import write_texts

from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.corpus.find import InputFile, find_files
from zerokara.tokenizer import sample_budget, training

WRITTEN = 2_000_000
"""UTF-8 bytes of each corpus, about."""


def _zipf(rng: random.Random, words: list[str], count: int) -> list[str]:
    """Words with frequencies as in a real text: the tenth is a tenth as frequent as the first."""
    return rng.choices(words, [1 / (rank + 3) for rank in range(len(words))], k=count)


def _made_up(rng: random.Random, letters: str, number: int, longest: int) -> list[str]:
    return ["".join(rng.choices(letters, k=rng.randint(1, longest))) for _ in range(number)]


def _corpus(path: Path, text: str, line: int) -> list[InputFile]:
    lines = [text[i : i + line] for i in range(0, len(text), line)]
    documents = ["\n".join(lines[i : i + 8]) for i in range(0, len(lines), 8)]
    return find_files([write_texts(path, documents)], "config.yaml:1")


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> list[InputFile]:
    rng = random.Random(1)
    text = " ".join(_zipf(rng, _made_up(rng, "etaoinshrdlucmfw", 30_000, 10), WRITTEN // 7))
    return _corpus(tmp_path_factory.mktemp("en") / "en.jsonl", text, 150)


@pytest.fixture(scope="module")
def japanese(tmp_path_factory: pytest.TempPathFactory) -> list[InputFile]:
    """Made-up words without spaces, each with an ending."""
    rng, kanji = random.Random(1), "".join(map(chr, range(0x4E00, 0x4E00 + 1200)))
    words = _zipf(rng, _made_up(rng, kanji[:300] * 4 + kanji, 15_000, 3), WRITTEN // 13)
    endings = _zipf(rng, _made_up(rng, "のにをはがとでもたしいてなられるかすまけりこよさあ", 3_000, 4), WRITTEN // 13)
    text = "".join(part for pair in zip(words, endings, strict=True) for part in pair)
    return _corpus(tmp_path_factory.mktemp("ja") / "ja.jsonl", text, 70)


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("language", ["english", "japanese"])
def test_no_training_takes_more_than_was_said(
    language: str, model_type: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    files: list[InputFile] = request.getfixturevalue(language)
    config = TokenizerConfig(model_type=model_type, vocab_size=6000)
    made = sample_budget.estimate(config, files)
    sentences = tmp_path / "sentences.txt"
    with open(files[0].path, encoding="utf-8") as file:
        sentences.write_text("".join(json.loads(line)["text"] + "\n" for line in file), "utf-8")
    _, peak = training.train(config, sentences, tmp_path, tmp_path / "training.log")
    assert peak < made.peak_bytes < 8 * peak


def test_auto_follows_the_free_memory_within_bounds(japanese: list[InputFile], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    peak = sample_budget.estimate(TokenizerConfig(sample_bytes=9_000_000), japanese).peak_bytes
    for free in (10**8, 10**9, 10**12):
        monkeypatch.setattr(sample_budget, "available_memory", lambda free=free: free)
        made = sample_budget.estimate(TokenizerConfig(), japanese)
        sizes.append(made.sample_bytes)
        assert made.peak_bytes == peak, "that of all the text that there is"
    assert sizes[0] == sample_budget.AUTO_LEAST_BYTES and sizes[-1] == sample_budget.AUTO_MOST_BYTES
    assert sizes == sorted(set(sizes))
    assert sizes[1] == pytest.approx(
        (0.5e9 - sample_budget.PROCESS_BYTES) / sample_budget.PEAK_BYTES["unigram"], rel=0.01
    )


def test_too_large_a_sample_is_told_what_fits(japanese: list[InputFile], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_budget, "available_memory", lambda: 100_000_000)
    config = TokenizerConfig(sample_bytes=400_000_000)
    made = sample_budget.estimate(config, japanese)
    fault = fault_of(sample_budget.check, config, made)
    assert fault.key == "sample_bytes" and str(made.largest_bytes) in fault.remedy
    assert made.largest_bytes == (80_000_000 - sample_budget.PROCESS_BYTES) // sample_budget.PEAK_BYTES["unigram"]
    monkeypatch.setattr(sample_budget, "available_memory", lambda: 500_000_000)
    sample_budget.check(config, sample_budget.estimate(config, japanese))
