"""llama.cpp converts an export whose tokenizer is BPE, and reads, computes and writes as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_exports import PACKAGES, Exports, ask, changed_copy, client

CONVERTER = PACKAGES / "llama.cpp" / "convert_hf_to_gguf.py"
TOLERANCE = 1e-3
"""Absolute, on log-probabilities: its CPU kernels keep the cache of keys and values in 16 bits."""
CONVERTED = ["llama-bpe", "mixtral"]


def convert(export: Path, gguf: Path, fails: bool = False) -> str:
    return client(CONVERTER, "transformers4+others", export, "--outtype", "f32", "--outfile", gguf, fails=fails)


@pytest.mark.parametrize("name", CONVERTED)
def test_ids_probabilities_and_greedy_tokens_are_equal(
    exports: Exports, new: dict[str, Any], tmp_path: Path, name: str
) -> None:
    convert(exports[name], tmp_path / "model.gguf")
    found = ask("with_llama_cpp.py", "others", tmp_path / "model.gguf", exports.questions, tmp_path)
    encoder, lines = exports.encoder(name), exports.questions["lines"]
    assert len(lines) >= 200
    assert found["ids"] == [encoder.encode(line).tolist() for line in lines]
    assert found["greedy"] == [tokens[-12:] for tokens in new[name]["greedy"]]
    compared = [
        np.abs([expected[int(token)] - log_prob for token, log_prob in theirs.items()]).max()
        for theirs, expected in zip(found["log_probs"], new[name]["next_log_probs"], strict=True)
        if theirs is not None
    ]
    assert len(compared) >= 2 and max(compared) < TOLERANCE, compared


def test_a_unigram_tokenizer_is_refused_loudly(exports: Exports, tmp_path: Path) -> None:
    assert not (exports["llama"] / "tokenizer.model").exists()
    convert(exports["llama"], tmp_path / "model.gguf", fails=True)
    assert not (tmp_path / "model.gguf").exists()


def test_a_broken_twin_is_seen(exports: Exports, tmp_path: Path) -> None:
    """Where nothing says that no space comes before a text, it puts one there."""
    changed_copy(
        exports["llama-bpe"],
        tmp_path / "twin",
        "tokenizer_config.json",
        lambda values: values.pop("add_prefix_space"),
    )
    convert(tmp_path / "twin", tmp_path / "model.gguf")
    ids = ask("with_llama_cpp.py", "others", tmp_path / "model.gguf", exports.questions, tmp_path)["ids"]
    encoder = exports.encoder("llama-bpe")
    wrong = sum(
        found != encoder.encode(line).tolist() for line, found in zip(exports.questions["lines"], ids, strict=True)
    )
    assert wrong > 100
