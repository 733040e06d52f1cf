"""Worker processes that die or meet errors end the step with a clear word, and never hang it."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from failing_encoder import FailingEncoder

from zerokara.corpus.inputs import find_files
from zerokara.errors import RunError
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.shards import Job, ShardResult
from zerokara.tokens.tasks import TaskQueue
from zerokara.tokens.workers import Workers


def _run(tmp_path: Path, *action: Any, workers: int = 2) -> list[Any]:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a line\n", encoding="utf-8")
    files = find_files([str(tmp_path)], "")
    queue = TaskQueue(files, task_bytes=5, txt_document="line")
    with Workers(workers) as started:
        return list(started.run(Job(FailingEncoder(*action), tmp_path, "text", "line"), queue))


def test_a_killed_worker(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"died \(killed by SIGKILL\) at .*\.txt, from 0; .*--set num_workers=1"):
        _run(tmp_path, "kill")
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if any("worker_process" in word for word in child.cmdline())]


def test_a_worker_that_ends_by_itself(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"died \(exit code 3\) .* What it said stands above"):
        _run(tmp_path, "exit")


def test_an_error_of_the_system_comes_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device") as raised:
        _run(tmp_path, "full")
    assert raised.value.errno == errno.ENOSPC


def test_an_unforeseen_error_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"(?s)not foreseen.*encode_joined.*ZeroDivisionError: a fault of ours"):
        _run(tmp_path, "fault")


def test_more_workers_than_tasks(tmp_path: Path, model_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a line\n", encoding="utf-8")
    job = Job(partial(Encoder, model_path), tmp_path, "text", "line")
    queue = TaskQueue(find_files([str(tmp_path)], ""), 1000, "line")
    with Workers(5) as workers:
        messages = list(workers.run(job, queue))
    assert queue.is_empty
    assert [message.documents for message in messages if isinstance(message, ShardResult)] == [1]


def test_a_worker_whose_parent_is_killed_ends(tmp_path: Path, model_path: Path) -> None:
    import subprocess
    import sys
    import time

    (tmp_path / "x.txt").write_text("a line\n" * 200_000, encoding="utf-8")
    program = (
        "import sys\nfrom functools import partial\nfrom pathlib import Path\n"
        "from failing_encoder import FailingEncoder\nfrom zerokara.corpus.inputs import find_files\n"
        "from zerokara.tokens.shards import Job\nfrom zerokara.tokens.tasks import TaskQueue\n"
        "from zerokara.tokens.workers import Workers\nfolder = Path(sys.argv[1])\n"
        "job = Job(FailingEncoder('slow'), folder, 'text', 'line')\n"
        "queue = TaskQueue(find_files([str(folder / 'x.txt')], ''), 9000, 'line')\n"
        "for message in Workers(2).run(job, queue):\n"
        "    print('begun', flush=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=env, stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline()
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) == 3  # the two, and the process that they were forked from
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)
