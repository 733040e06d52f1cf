from __future__ import annotations

import pytest
from tiny import python_path, tiny_data, train_runs

from zerokara.training.processes import launcher

__all__ = ["python_path", "tiny_data", "train_runs"]


@pytest.fixture(scope="session")
def lone_environment() -> dict[str, str]:
    return launcher.rank_environment(0, 1)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, lone_environment: dict[str, str]) -> None:
    """As the launcher starts the only process of a run."""
    for name, value in lone_environment.items():
        monkeypatch.setenv(name, value)
