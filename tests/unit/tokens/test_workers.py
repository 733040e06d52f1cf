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
from zerokara.corpus.packed import zstd_module
from zerokara.errors import RunError, UserError
from zerokara.steps.tokenize import _likely_tokenizer
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.estimate import Place
from zerokara.tokens.preparation import Forecast, Preparation, Prepared
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


def test_a_file_that_can_never_be_read_comes_as_the_users_fault(tmp_path: Path, model_path: Path) -> None:
    zstd = zstd_module()
    window = {zstd.CompressionParameter.window_log: 31}
    wide = zstd.ZstdCompressor(options=window)
    path = tmp_path / "x.txt.zst"
    path.write_bytes(zstd.compress(b"a line\n") + wide.compress(b"a line\n" * 99) + wide.flush())
    queue = TaskQueue(find_files([str(path)], ""), 1000, "line")
    with Workers(1) as workers, pytest.raises(UserError) as raised:
        list(workers.run(Job(partial(Encoder, model_path), tmp_path, "text", "line"), queue))
    assert str(raised.value).startswith(f"{path}: can only be unpacked with a window of 2,147,483,648 bytes")


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


def test_what_is_no_tokenizer_is_told_as_the_user_s_fault(tmp_path: Path) -> None:
    (tmp_path / "x.model").write_bytes(b"no model")
    with Workers() as workers:
        workers.ask(Preparation(tmp_path / "x.model", [], 0))
        with pytest.raises(UserError, match=r"^\S*/x\.model: is not a SentencePiece model .*; make one with step 1$"):
            workers.answer()


def test_the_nursery_opens_and_estimates(model_path: Path) -> None:
    encoder = Encoder(model_path)
    with Workers() as workers:
        workers.open(Forecast(Path("nothing there")))  # a wrong guess
        workers.ask(Preparation(model_path, [Place(["a line\n" * 50], 400)], 4000))
        prepared = workers.answer()
    assert isinstance(prepared, Prepared) and prepared.tokenizer == encoder.facts
    assert prepared.choice.encoder is None and prepared.choice.name.startswith("sentencepiece")
    assert prepared.expected.tokens == 10 * len(encoder.encode_joined(["a line\n" * 50])[0])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--config", "c.yaml"], "a/t.model"),
        (["--config=c.yaml", "--redo"], "a/t.model"),
        (["--config", "c.yaml", "--set", "input_tokenizer_file=b.model"], "b.model"),
        (["--config", "nothing.yaml"], None),
        ([], None),
    ],
)
def test_the_tokenizer_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], expected: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text('lr: 1\ninput_tokenizer_file: "a/t.model"  # from step 1\n', encoding="utf-8")
    assert _likely_tokenizer(argv) == (Path(expected) if expected else None)
