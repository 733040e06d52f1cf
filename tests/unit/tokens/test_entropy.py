"""Entropy against values known by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from made_tokens import write_documents

from zerokara.tokens.indexed import IndexedTokens, entropy, token_counts


@pytest.mark.parametrize(("ids", "nats"), [([3, 4, 5, 6], math.log(4)), ([7, 7, 7], 0.0), ([1, 1, 2, 2], math.log(2))])
def test_entropy(tmp_path: Path, ids: list[int], nats: float) -> None:
    write_documents(tmp_path / "t", [np.array(ids)], np.dtype(np.uint16))
    assert entropy(token_counts(IndexedTokens(tmp_path / "t"))) == pytest.approx(nats)
    assert entropy(np.array([0.5, 0.0, 0.25, 0.25])) == pytest.approx(1.5 * math.log(2))
