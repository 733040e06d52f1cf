"""Which documents are kept for validation."""

from collections.abc import Callable

import numpy as np
import pytest

from zerokara.base.errors import UserError
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.tokens import held_out


def _valid(n: int, k: int, seed: int = 1, source: int = 0) -> list[int]:
    threshold, keys = held_out.valid_threshold(n, k, seed, source), held_out.document_keys(0, n, seed, source)
    return [] if threshold is None else np.flatnonzero(keys <= np.uint64(threshold)).tolist()


@pytest.mark.parametrize(
    ("documents", "fraction", "minimum", "expected"),
    [(10000, 0.01, 10, 100), (500, 0.01, 10, 10), (500, 0.0, 10, 0), (150, 0.01, 0, 2), (40, 0.01, 0, 0)],
)
def test_how_many(
    make_config: Callable[..., PretrainConfig], documents: int, fraction: float, minimum: int, expected: int
) -> None:
    config = make_config(valid_fraction=fraction, valid_min_documents=minimum)
    assert held_out.num_valid_documents(config, 0, documents) == expected


def test_documents_are_drawn_from_the_whole_source() -> None:
    for n, k in ((1000, 0), (1000, 1), (1000, 500), (7, 7)):
        assert len(_valid(n, k)) == k
    tenths = np.bincount(np.array(_valid(10000, 1000)) // 1000, minlength=10)
    assert tenths.min() > 60 and tenths.max() < 140  # 100 ± 4 standard deviations of a hypergeometric draw


def test_a_pure_function_of_seed_source_and_document(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _valid(3000, 30)
    assert first != _valid(3000, 30, seed=2) and first != _valid(3000, 30, source=1)
    monkeypatch.setattr(held_out, "_KEYS_AT_ONCE", 64)
    assert _valid(3000, 30) == first
    parts = [held_out.document_keys(start, 100, 1, 0) for start in range(0, 3000, 100)]
    assert np.concatenate(parts).tolist() == held_out.document_keys(0, 3000, 1, 0).tolist()


def test_keys_have_no_ties_and_stay_what_they_are() -> None:
    assert len(np.unique(held_out.document_keys(0, 200_000, 5, 3))) == 200_000
    # Written down once: another version must draw the same documents.
    assert _valid(1000, 5, seed=1234) == [86, 181, 189, 651, 859]


def test_too_small_a_source(make_config: Callable[..., PretrainConfig]) -> None:
    config = make_config(valid_min_documents=10)
    with pytest.raises(UserError, match=r"valid_min_documents = 10: .* 19 documents.* 9 or less"):
        held_out.num_valid_documents(config, 0, 19)
    assert held_out.num_valid_documents(config, 0, 20) == 10
    with pytest.raises(UserError, match=r"the source .*corpus.jsonl holds no document with text"):
        held_out.num_valid_documents(config, 0, 0)
