"""The page about many machines says what its program computes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks" / "scale.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_numbers_of_the_program(scale: ModuleType) -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert scale.filled(page) == page, "run: python benchmarks/scale.py --write"


def test_a_ring_sends_what_it_must(scale: ModuleType) -> None:
    """By hand: 8 bytes, on 2 machines of a link of 1 byte a second; inside almost nothing."""
    traffic = scale.Traffic(2, 1.0)
    assert traffic.gather(8) == pytest.approx(4, rel=1e-6) and traffic.sum(8) == pytest.approx(8, rel=1e-6)
    assert scale.Traffic(1, 1.0).gather(8) == traffic.gather_inside(8) < 1e-9


def test_without_failures_all_is_training_but_the_saves(scale: ModuleType) -> None:
    monthly = scale.useful_share(1, 600.0, 6.0, 0.0)
    assert monthly == pytest.approx(600 / 606, rel=1e-3)
    assert scale.useful_share(64, 600.0, 6.0, 3600.0) < scale.useful_share(64, 600.0, 6.0, 60.0) < monthly
