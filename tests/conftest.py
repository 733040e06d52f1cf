"""What all tests share: tests that need a GPU are left out where there is none, and each part's time is printed."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("ZEROKARA_SHARE_CORES", "1")  # two processes are tried on one core too (run_tests.sh pins to one)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=int, default=50, help="how many kills tests/faults tries (default 50)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu:
        return
    import torch  # seconds to import, so only where it matters

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds["/".join(Path(report.nodeid.split("::")[0]).parts[:2])] += report.duration
    for part, spent in sorted(seconds.items()):
        terminalreporter.write_line(f"{part}: {spent:.1f} s")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
