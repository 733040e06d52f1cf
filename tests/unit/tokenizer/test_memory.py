"""The plan of a training: how much text, how much memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerokara.config import TokenizerConfig
from zerokara.corpus.inputs import InputFile
from zerokara.errors import UserError
from zerokara.tokenizer import memory

FILES = [InputFile(Path("a.txt"), 0, "txt", False, 50_000_000, 0), InputFile(Path("b.gz"), 0, "txt", True, 10**8, 0)]


@pytest.mark.parametrize(
    ("free", "expected"), [(4_400_000_000, 100_000_000), (10**12, 200_000_000), (10**8, 10_000_000)]
)
def test_auto_follows_the_free_memory_within_bounds(free: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    made = memory.plan(TokenizerConfig(), FILES)
    assert made.sample_bytes == expected
    assert made.peak_bytes == memory.BASE_BYTES + 22 * expected


def test_a_small_corpus_needs_no_more_than_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**10)
    made = memory.plan(TokenizerConfig(model_type="bpe", sample_bytes=10**9), FILES[:1])
    assert made.peak_bytes == memory.BASE_BYTES + 30 * 50_000_000


def test_a_sample_too_large_for_the_machine_is_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 2_300_000_000)
    config = TokenizerConfig(sample_bytes=400_000_000)
    made = memory.plan(config, FILES)
    with pytest.raises(
        UserError, match=r"sample_bytes = 400000000: needs about 8\.9 GB .* 2\.3 GB are free; set 80000000"
    ):
        memory.check(config, made)


def test_the_machine_has_memory() -> None:
    assert memory.available_bytes() > 10**6
