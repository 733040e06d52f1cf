"""The forge of training processes, the run that nothing befell, and the table of faults at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from faults.running import Forge, make_forge, table, trained_unbroken
from tiny import Trained, python_path, tiny_data, train_runs

__all__ = ["python_path", "tiny_data", "train_runs"]


@pytest.fixture(scope="session")
def forge(tiny_data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Training processes on this machine's own disk."""
    yield from make_forge(tiny_data, tmp_path_factory.mktemp("forge"))


@pytest.fixture(scope="session")
def unbroken(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run that nothing befell."""
    folder = tmp_path_factory.mktemp("unbroken")
    return trained_unbroken(forge, folder / "run", {"count_lines": str(folder / "lines.json")})


@pytest.fixture(scope="session")
def lines_of_a_save(unbroken: Trained) -> int:
    """Lines of our code that a save runs, once there is something to prune."""
    counts: list[int] = json.loads((unbroken.folder.parent / "lines.json").read_text(encoding="utf-8"))
    return max(counts[4:])


@pytest.fixture(scope="session")
def num_kills(request: pytest.FixtureRequest) -> int:
    """How many kills to try: ``pytest tests/faults --faults 500``."""
    return int(request.config.getoption("--faults"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if table():
        terminalreporter.section("faults tried and survived")
        for line in table():
            terminalreporter.write_line(line)
