"""Every test of this folder is the only process of a run, joined by NCCL, whatever ran in this process before it."""

from collections.abc import Iterator

import pytest
from engines import join_alone, leave, require_backend
from gpu_device import BACKEND, DEVICE
from tiny import python_path, tiny_data, train_runs

__all__ = ["python_path", "tiny_data", "train_runs"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As the launcher starts the only process of a run; fails where any group of it is not NCCL's."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    join_alone(DEVICE.type)
    require_backend(BACKEND)
    yield
    require_backend(BACKEND)


@pytest.fixture(scope="module", autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """For the tests that follow, which open their own on a CPU."""
    yield
    leave()
