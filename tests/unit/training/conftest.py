from __future__ import annotations

import pytest
from tiny import span_data, tiny_data

from zerokara.training.monitoring import step_metrics

__all__ = ["span_data", "tiny_data"]


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a recorder logs."""
    logged: list[str] = []
    monkeypatch.setattr(step_metrics, "log", logged.append)
    return logged
