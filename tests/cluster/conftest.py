"""The hosts of these tests, and runs on them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster.hosts import OWN, Host, Training, cluster
from tiny import make_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that name a small corpus and a small model; all hosts see the files."""
    return make_data(tmp_path_factory.mktemp("data"), save_interval="5", log_interval="1")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with cluster(2) as made:
        yield made


@pytest.fixture
def train(data: dict[str, str], tmp_path: Path) -> Callable[..., Training]:
    """Start a run on hosts, in a folder that is each host's own or that all share."""

    def start(
        on: list[Host],
        shared: bool = False,
        name: str = "run",
        of: Mapping[int, Mapping[str, Any]] | None = None,
        start: Sequence[int] | None = None,
        **settings: Any,
    ) -> Training:
        folder = (tmp_path if shared else OWN) / name
        chosen = {"config": data["config"], "output_model_dir": folder, "num_processes": 1, **settings}
        return Training(on, tmp_path / f"logs-{name}", chosen, of or {}, range(len(on)) if start is None else start)

    return start
