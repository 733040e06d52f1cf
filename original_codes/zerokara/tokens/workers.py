"""Worker processes that turn tasks into shards, each over a connection of its own.

One connection a worker, and no shared queue or lock: whatever a worker dies of (out of memory, kill -9), the others and
the parent see nothing worse than the end of its connection. A worker whose parent is gone ends at its next message.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zerokara.errors import Fault, RunError, UserError
from zerokara.tokenizer.encoder_choice import EncoderOpener
from zerokara.tokens.messages import FORK, EndOf, Question

if TYPE_CHECKING:  # the workers are started before the parent has loaded these itself
    from zerokara.tokens.shards import Job, ShardResult, Tally
    from zerokara.tokens.tasks import Task, TaskQueue


class _Worker:
    """A process, and what it is doing."""

    def __init__(self, number: int, nursery: Connection):
        self.number = number
        self.task: Task | None = None
        self._nursery = nursery
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        with theirs, suppress(BrokenPipeError, ConnectionResetError, EOFError):  # told when it is read
            nursery.send(FORK)
            send_handle(nursery, theirs.fileno(), None)
            self.pid: int = nursery.recv()

    def begin(self, task: Task | None) -> None:
        """Hand it its next task, if any."""
        self.task = task
        if task is not None:
            _send(self.connection, task)

    def receive(self) -> Tally | ShardResult:
        """Its next message.

        Raises:
            RunError: it died, or met an error that was not foreseen.
            OSError, UserError: as it met it.
            FastEncoderDiffersError: its encoder gave other ids than SentencePiece.
        """
        message: Tally | ShardResult | Exception = _receive(self.connection, self._death)
        if isinstance(message, Exception):
            raise message
        return message

    def _death(self) -> RunError:
        code: int | None = None
        with suppress(BrokenPipeError, ConnectionResetError, EOFError, AttributeError):
            self._nursery.send(EndOf(self.pid))
            code = self._nursery.recv()
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
            why = "Most often the machine ran out of memory: run again with fewer processes (--set num_workers=1)"
        else:
            how, why = f"exit code {code}", "What it said stands above"
        assert self.task is not None
        first = self.task.ranges[0]
        return RunError(
            f"a tokenising process died ({how}) at {first.file.name}, from {first.start:,}; what was finished is kept, "
            f"and the same command goes on. {why}"
        )


class Workers:
    """Worker processes, and the nursery they are forked from, which loads its modules while the parent prepares."""

    def __init__(self, number: int = 1):
        self.number = number
        """Workers that `run` has at work."""
        self._workers: dict[Connection, _Worker] = {}
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._nursery = subprocess.Popen(
                [sys.executable, "-P", "-m", "zerokara.tokens.worker_process", str(descriptor)],
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
                # numpy would start threads for matrix products, which no worker makes, and a fork would not have.
                env={**os.environ, "PYTHONPATH": _python_path(), "OPENBLAS_NUM_THREADS": "1"},
                # Ctrl-C reaches the whole group in front of a terminal: it is for the parent, who ends the others.
                process_group=0,
            )
        self._connection = Connection(ours.detach())
        _send(self._connection, list(sys.path))

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._connection.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._nursery.pid, signal.SIGKILL)  # the workers are in its group
        self._nursery.wait()
        for connection in self._workers:
            with suppress(EOFError, OSError):
                while True:  # its end is the end of the worker, which writes nothing from then on
                    connection.recv_bytes()
            connection.close()
        self._connection.close()
        self._workers = {}

    def open(self, encoder: Hashable) -> None:
        """Let them open an encoder that will most likely be needed; `encoder` opens it when it is called."""
        _send(self._connection, encoder)

    def ask(self, question: Question) -> None:
        """Let the nursery find something out; `answer` waits for it. One question at a time."""
        _send(self._connection, question)

    def answer(self) -> object:
        """The answer to what was asked.

        Raises:
            UserError: found by the question.
            RunError: an error that was not foreseen.
        """
        died = RunError("the tokenising process died while it opened the tokenizer; what it said stands above")
        answer: object = _receive(self._connection, lambda: died)
        if isinstance(answer, list):
            raise UserError([Fault(where="", rule=text) for text in answer])
        return answer

    def run(self, job: Job, queue: TaskQueue) -> Iterator[Tally | ShardResult]:
        """Do every task of the queue, giving progress and results as they come, in no fixed order; once only.

        Raises:
            RunError: a worker died or met an error that was not foreseen.
            OSError: as the worker met it (a full disk, a file that is gone).
            UserError: a file that can never be read.
            FastEncoderDiffersError: the fast encoder gave other ids than SentencePiece.
        """
        from zerokara.tokens.shards import ShardResult

        if isinstance(job.open_encoder, EncoderOpener):  # once, for all of them
            self.open(job.open_encoder)
        made = [_Worker(number, self._connection) for number in range(self.number)]
        self._workers = {worker.connection: worker for worker in made}
        for worker in made:
            _send(worker.connection, job)
            worker.begin(queue.next(worker.number))
        while busy := [worker.connection for worker in self._workers.values() if worker.task is not None]:
            for connection in wait(busy):
                assert isinstance(connection, Connection)
                worker = self._workers[connection]
                message = worker.receive()
                if isinstance(message, ShardResult):
                    assert worker.task is not None
                    queue.finished(worker.task, message.at_end)
                    worker.begin(queue.next(worker.number))
                yield message


def _send(connection: Connection, content: object) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # it is dead, which is told when it is read next
        connection.send(content)


def _receive(connection: Connection, death: Callable[[], RunError]) -> Any:
    """The next message of a process; text is the traceback of an error that it did not foresee."""
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        raise death() from None
    if isinstance(message, str):
        raise RunError(f"a tokenising process met an error that was not foreseen:\n{message}")
    return message


def _python_path() -> str:
    """The package must be found by a process that starts afresh."""
    source_root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([source_root, *filter(None, [os.environ.get("PYTHONPATH")])])
