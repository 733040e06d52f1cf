"""llama.cpp converts an export whose tokenizer is BPE, and reads, computes and writes as transformers does."""

from pathlib import Path
from typing import Any

import pytest
from clients.client_exports import PACKAGES, Exports, ask, changed_copy, client

CONVERTER = PACKAGES / "llama.cpp" / "convert_hf_to_gguf.py"
TOLERANCE = 0.02
"""Absolute, on log-probabilities with a standard deviation of 1.4: its CPU kernels compute activations and attention in
16 bits, and 0.006 was seen."""
CONVERTED = ["llama-bpe", "mixtral"]


def convert(export: Path, gguf: Path, fails: bool = False) -> str:
    return client(CONVERTER, "transformers4+inference", export, "--outtype", "f32", "--outfile", gguf, fails=fails)


@pytest.mark.parametrize("name", CONVERTED)
def test_ids_probabilities_and_text_are_equal(exports: Exports, new: dict[str, Any], tmp_path: Path, name: str) -> None:
    convert(exports[name], tmp_path / "model.gguf")
    found = ask("with_llama_cpp.py", "inference", tmp_path / "model.gguf", exports.questions)
    encoder, lines = exports.encoder(name), exports.questions["lines"]
    assert len(lines) >= 200
    assert found["ids"] == [encoder.encode(line).tolist() for line in lines]
    assert found["greedy"] == [tokens[-12:] for tokens in new[name]["greedy"]]
    compared = differences(found, new[name])
    assert len(compared) == len(exports.questions["prompts"]) and max(compared) < TOLERANCE, compared


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[float]:
    """The largest of each prompt's, over the most likely tokens."""
    return [
        max(abs(ours[int(token)] - log_prob) for token, log_prob in theirs.items())
        for theirs, ours in zip(found["log_probs"], expected["next_log_probs"], strict=True)
    ]


def test_a_unigram_tokenizer_is_refused_loudly(exports: Exports, tmp_path: Path) -> None:
    assert not (exports["llama"] / "tokenizer.model").exists()
    said = convert(exports["llama"], tmp_path / "model.gguf", fails=True)
    assert "BPE pre-tokenizer was not recognized" in said
    assert not (tmp_path / "model.gguf").exists()


def test_of_a_qwen3_it_puts_a_space_before_every_text(exports: Exports, tmp_path: Path) -> None:
    """Its converter reads a SentencePiece model for this family without the setting that says otherwise."""
    convert(exports["qwen3-bpe"], tmp_path / "model.gguf")
    found = ask("with_llama_cpp.py", "inference", tmp_path / "model.gguf", exports.questions)
    encoder, lines = exports.encoder("qwen3-bpe"), exports.questions["lines"]
    spaced = [encoder.encode(f" {line}" if line else "").tolist() for line in lines]
    assert found["ids"] == spaced


def test_without_the_word_on_spaces_it_puts_one_before_every_text(exports: Exports, tmp_path: Path) -> None:
    changed_copy(
        exports["llama-bpe"], tmp_path / "twin", "tokenizer_config.json", lambda values: values.pop("add_prefix_space")
    )
    convert(tmp_path / "twin", tmp_path / "model.gguf")
    found = ask("with_llama_cpp.py", "inference", tmp_path / "model.gguf", exports.questions)
    expected = [exports.encoder("llama-bpe").encode(line).tolist() for line in exports.questions["lines"]]
    assert sum(ids != ours for ids, ours in zip(found["ids"], expected, strict=True)) > 100
