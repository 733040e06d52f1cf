"""Worker processes that die or meet errors end the step with a clear word, and never hang it."""

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from unit.tokens.failing_encoder import FailingEncoder

from zerokara.base.errors import RunError
from zerokara.corpus.find import find_files
from zerokara.tokens.encode import run_in_workers
from zerokara.tokens.shard_tasks import WHOLE, input_streams
from zerokara.tokens.shards import Job


def _run(tmp_path: Path, encoder: Any, task_bytes: int = 5, workers: int = 2) -> list[Any]:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a line\n", encoding="utf-8")
    todo, _ = input_streams(find_files([str(tmp_path)], ""), task_bytes, "line", WHOLE, {})
    with closing(run_in_workers(Job(encoder, tmp_path, "text", "line"), todo, workers)) as results:
        return list(results)


def test_a_killed_worker(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RunError, match=r"died at one of: .*0\.txt from byte 0, .*--set num_workers=1"):
        _run(tmp_path, FailingEncoder("kill"))
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in left if psutil.Process().pid != process.ppid()], "a worker is left"


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        ("full", OSError, "No space left on device"),
        ("fault", ZeroDivisionError, "a fault of ours"),
    ],
)
def test_errors_of_workers(tmp_path: Path, action: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        _run(tmp_path, FailingEncoder(action))
    assert action != "full" or (isinstance(raised.value, OSError) and raised.value.errno == errno.ENOSPC)


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
PROGRAM = """
import sys
from pathlib import Path
from unit.tokens.failing_encoder import FailingEncoder
from zerokara.corpus.find import find_files
from zerokara.tokens.shards import Job
from zerokara.tokens.shard_tasks import WHOLE, input_streams
from zerokara.tokens.encode import run_in_workers

folder, action = Path(sys.argv[1]), sys.argv[2]
todo, _ = input_streams(find_files([str(folder / "x.txt")], ""), 9000, "line", WHOLE, {})
for result in run_in_workers(Job(FailingEncoder(action), folder, "text", "line"), todo, 2):
    print("begun", flush=True)
"""


def _begun(folder: Path, action: str, before: str = "") -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start the program, `before` first, and wait until it works; return it and its processes."""
    (folder / "x.txt").write_text("a line\n" * 200_000, encoding="utf-8")
    command, pipe = [sys.executable, "-c", before + PROGRAM, str(folder), action], subprocess.PIPE
    parent = subprocess.Popen(command, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    assert parent.stdout is not None and parent.stdout.readline()
    return parent, psutil.Process(parent.pid).children(recursive=True)


@pytest.mark.parametrize("action", ["slow", "stuck"])
def test_no_process_outlives_a_killed_parent(tmp_path: Path, action: str) -> None:
    parent, children = _begun(tmp_path, action)
    assert len(children) == 4  # two workers, the fork server that they were forked from, and its resource tracker
    parent.kill()
    parent.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)


def test_ctrl_c_reaches_the_parent_only(tmp_path: Path) -> None:
    # A shell starts what it puts in the background (`./run_tests.sh &`) with Ctrl-C ignored.
    heeding = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    parent, children = _begun(tmp_path, "slow", heeding)
    for child in children:
        child.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert all(child.is_running() for child in children) and parent.poll() is None
    os.killpg(parent.pid, signal.SIGINT)
    _, errors = parent.communicate(timeout=30)
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")
    psutil.wait_procs(children, timeout=30)
    assert not any(child.is_running() for child in children)
