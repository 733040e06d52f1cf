"""Counting from headers, and the guard against another tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_tokens import write_documents

from zerokara import manifest
from zerokara.config.data import causal
from zerokara.errors import UserError
from zerokara.tokens.indexed import IndexedTokens, TokenPaths, bin_path, check_belongs, count


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    random = np.random.default_rng(1)
    paths = TokenPaths(str(tmp_path / "x"))
    for split, documents in ((paths.train, 40), (paths.valid, 5)):
        write_documents(
            split, [random.integers(0, 99, random.integers(1, 50)) for _ in range(documents)], np.dtype("u2")
        )
    return str(tmp_path / "x")


def test_counts_equal_brute_force(prefix: str) -> None:
    counts = count(prefix)
    assert counts.valid is not None
    for split, found in ((TokenPaths(prefix).train, counts.train), (TokenPaths(prefix).valid, counts.valid)):
        tokens = IndexedTokens(split)
        lengths = [len(tokens[i]) for i in range(len(tokens))]
        assert (found.documents, found.tokens) == (len(lengths), sum(lengths))
        assert found.bytes == 2 * sum(lengths) and found.mean_tokens == pytest.approx(np.mean(lengths))


@pytest.mark.parametrize(
    ("tokens", "seq_len", "samples"), [(1025, 256, 4), (1024, 256, 3), (257, 256, 1), (256, 256, 0), (0, 256, 0)]
)
def test_samples_need_one_token_after_them(tokens: int, seq_len: int, samples: int) -> None:
    assert causal(seq_len).samples_in(tokens) == samples


def test_without_validation(prefix: str) -> None:
    for suffix in (".bin", ".idx"):
        Path(f"{prefix}_valid_text_document{suffix}").unlink()
    assert count(prefix).valid is None


def test_a_billion_tokens_are_counted_at_once(tmp_path: Path) -> None:
    # A sparse file: 2 GB long, nothing on disk.
    paths = TokenPaths(str(tmp_path / "x"))
    length = 1_000_000
    from zerokara.tokens.indexed import idx_path, write_index

    with open(idx_path(paths.train), "wb") as file:
        write_index(file, np.full(1000, length, dtype=np.int32), np.dtype("u2"))
    with open(bin_path(paths.train), "wb") as file:
        file.truncate(1000 * length * 2)
    assert count(str(tmp_path / "x")).train.tokens == 1_000_000_000


def test_the_tokens_belong_to_one_tokenizer(prefix: str) -> None:
    paths = TokenPaths(prefix)
    with pytest.raises(UserError, match="there is no manifest here"):
        check_belongs(prefix, "a" * 64)
    work = manifest.StepSpec("tokenize", {})
    manifest.write(paths.manifest, work, {"tokens": bin_path(paths.train)}, {"tokenizer_sha256": "a" * 64}, 0.0)
    assert check_belongs(prefix, "a" * 64).step == "tokenize"
    with pytest.raises(UserError) as raised:
        check_belongs(prefix, "b" * 64)
    message = str(raised.value)
    assert "a" * 64 in message and "b" * 64 in message and "step 2 with --redo" in message
