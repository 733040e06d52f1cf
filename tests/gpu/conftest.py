from __future__ import annotations

import socket

import pytest
from tiny import python_path, tiny_data, train_runs

__all__ = ["python_path", "tiny_data", "train_runs"]


@pytest.fixture(scope="session")
def port() -> str:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    """As the launcher starts the only process of a run: without these, DeepSpeed would ask MPI for them."""
    named = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
