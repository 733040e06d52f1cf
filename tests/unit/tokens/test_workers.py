"""Worker processes that die or meet errors end the step with a clear word, and never hang it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from zerokara.corpus.inputs import find_files
from zerokara.corpus.reading import ByteRange
from zerokara.errors import RunError
from zerokara.tokens.shards import Job, ShardResult, Task
from zerokara.tokens.workers import run_tasks


class _Opener:
    """Opens an encoder that does something else instead. Works by fork and by spawn."""

    def __init__(self, *action: Any):
        self.action = action

    vocab_size, eos_id = 100, 2

    def __call__(self) -> Any:
        return self

    def encode_many(self, texts: Any) -> Any:
        if self.action[0] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action[0] == "exit":
            os._exit(3)
        if self.action[0] == "full":
            raise OSError(errno.ENOSPC, "No space left on device", "shard")
        raise ZeroDivisionError("a fault of ours")


@pytest.fixture(autouse=True)
def _fork(monkeypatch: pytest.MonkeyPatch) -> None:
    # A spawned process cannot import this test module; how the processes start makes no difference here.
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: multiprocessing.context.ForkContext())


def _run(tmp_path: Path, *action: Any, workers: int = 2) -> list[Any]:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a line\n", encoding="utf-8")
    files = find_files([str(tmp_path)], "")
    tasks = [Task(number, 0, (ByteRange(file),)) for number, file in enumerate(files)]
    return list(run_tasks(Job(_Opener(*action), tmp_path, "text", "line"), tasks, workers))


def test_a_killed_worker(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"died \(killed by SIGKILL\) at .*\.txt, from byte 0; .*--set num_workers=1"):
        _run(tmp_path, "kill")
    assert not multiprocessing.active_children()


def test_a_worker_that_ends_by_itself(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"died \(exit code 3\) .* What it said stands above"):
        _run(tmp_path, "exit")


def test_an_error_of_the_system_comes_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device") as raised:
        _run(tmp_path, "full")
    assert raised.value.errno == errno.ENOSPC


def test_an_unforeseen_error_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"(?s)not foreseen.*encode_many.*ZeroDivisionError: a fault of ours"):
        _run(tmp_path, "fault")


def test_more_workers_than_tasks(tmp_path: Path, model_path: Path) -> None:
    from functools import partial

    from zerokara.tokenizer.encoder import Encoder

    (tmp_path / "x.txt").write_text("a line\n", encoding="utf-8")
    (file,) = find_files([str(tmp_path)], "")
    job = Job(partial(Encoder, model_path), tmp_path, "text", "line")
    messages = list(run_tasks(job, [Task(0, 0, (ByteRange(file),))], 5))
    assert [message.documents for message in messages if isinstance(message, ShardResult)] == [1]
