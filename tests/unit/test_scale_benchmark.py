"""The page about many machines says what its program computes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_numbers_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    scale = importlib.import_module("scale")
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert scale.filled(page) == page, "run: python benchmarks/scale.py --write"
