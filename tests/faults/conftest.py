"""The forge of training processes and the run that nothing befell."""

import json
import time
from collections.abc import Callable, Iterator

import pytest
from faults.running import BY_COMMAND, DATA, LEFT_OUT, SHORT, Forge, trained_unbroken
from tiny import Trained, make_data, python_path, train_runs

__all__ = ["python_path", "train_runs"]


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that name a corpus so small that a short run reads all of it."""
    return make_data(tmp_path_factory.mktemp("tiny"), **DATA)


@pytest.fixture(scope="session")
def forge(tiny_data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    made = Forge(tiny_data, tmp_path_factory.mktemp("forge"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def unbroken(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("unbroken")
    return trained_unbroken(forge, folder / "run", {"count_lines": str(folder / "lines.json")})


@pytest.fixture(scope="session")
def unbroken_seconds(forge: Forge, unbroken: Trained, tmp_path_factory: pytest.TempPathFactory) -> float:
    started = time.monotonic()
    trained_unbroken(forge, tmp_path_factory.mktemp("timed") / "run")
    return time.monotonic() - started


@pytest.fixture(scope="session")
def lines_of_a_save(unbroken: Trained) -> int:
    """Lines of our code that a save runs, once there is something to prune."""
    counts: list[int] = json.loads((unbroken.folder.parent / "lines.json").read_text(encoding="utf-8"))
    return max(counts[4:])


@pytest.fixture(scope="session")
def in_two_processes(train_runs: Callable[..., dict[str, Trained]]) -> dict[str, Trained]:
    """Runs that share one start of two processes: steps left out under each ZeRO stage, and `BY_COMMAND`, unbroken."""
    bad = {**SHORT, "precision": "bf16", "micro_batch_size": 2, "fault": LEFT_OUT}
    runs = {f"left_out_{stage}": {**bad, "zero_stage": stage} for stage in (1, 2, 3)}
    return train_runs({**runs, "by_command": BY_COMMAND}, 2)


@pytest.fixture(scope="session")
def num_kills(request: pytest.FixtureRequest) -> int:
    """Number of kills to try: ``pytest tests/faults --faults 500``."""
    return int(request.config.getoption("--faults"))
