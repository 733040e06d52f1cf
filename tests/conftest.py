"""What all tests share: tests that need a GPU are left out where there is none; each part's time is printed, and which
tests came nearest to what rounding explains."""

import os
import signal
from collections import defaultdict
from pathlib import Path

import pytest
import rounding
from warm import warm_python, warm_server

__all__ = ["warm_python", "warm_server"]
ROOT = Path(__file__).resolve().parent.parent
SHARE = "share_of_tolerance"
"""Name of the property, in the report of a test, that says how near to its tolerance it came."""
os.environ.setdefault("ZEROKARA_SHARE_CORES", "1")  # two processes are tried on one core too (run_tests.sh pins to one)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=int, default=24, help="how many kills tests/faults tries (default 24)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu:
        return
    import torch  # seconds to import, so only where it matters
    from gpu_device import REHEARSED

    if not torch.cuda.is_available() and not REHEARSED:
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> None:
    if call.when == "call" and rounding.shares:
        item.user_properties.append((SHARE, max(rounding.shares)))
        rounding.shares.clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: dict[str, float] = defaultdict(float)
    taken: list[tuple[float, str]] = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds["/".join(Path(report.nodeid.split("::")[0]).parts[:2])] += report.duration
                if report.when == "call":
                    taken += [(share, report.nodeid) for name, share in report.user_properties if name == SHARE]
    for part, spent in sorted(seconds.items()):
        terminalreporter.write_line(f"{part}: {spent:.1f} s")
    for share, test in sorted(taken, reverse=True)[:3]:
        terminalreporter.write_line(f"nearest to its tolerance, {share:.2f} of it: {test}")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
