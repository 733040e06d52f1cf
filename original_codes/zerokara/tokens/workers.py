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
from collections.abc import Hashable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from zerokara.errors import RunError

if TYPE_CHECKING:  # the workers are started before the parent has loaded these itself
    from zerokara.tokens.shards import Job, ShardResult, Tally
    from zerokara.tokens.tasks import Task, TaskQueue


class _Worker:
    """A process, and what it is doing."""

    def __init__(self, number: int):
        self.number = number
        self.task: Task | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "zerokara.tokens.worker_process", str(descriptor)],
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
                # Each numpy starts threads for matrix products, which no worker makes, and waits for them.
                env={**os.environ, "PYTHONPATH": _python_path(), "OPENBLAS_NUM_THREADS": "1"},
                # Ctrl-C reaches the whole group in front of a terminal: it is for the parent, who ends the others.
                process_group=0,
            )
        self.connection = Connection(ours.detach())
        self.send(list(sys.path))

    def begin(self, task: Task | None) -> None:
        """Hand it its next task, if any."""
        self.task = task
        if task is not None:
            self.send(task)

    def receive(self) -> Tally | ShardResult:
        """Its next message.

        Raises:
            RunError: it died, or met an error that was not foreseen.
            OSError: as it met it.
            StandInDiffersError: its encoder gave other ids than SentencePiece.
        """
        from zerokara.tokenizer.stand_in import StandInDiffersError

        try:
            message: Tally | ShardResult | OSError | StandInDiffersError | str = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        if isinstance(message, OSError | StandInDiffersError):
            raise message
        if isinstance(message, str):
            raise RunError(f"a tokenising process met an error that was not foreseen:\n{message}")
        return message

    def send(self, content: object) -> None:
        """Send it something."""
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead, which is told when it is read next
            self.connection.send(content)

    def _death(self) -> RunError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        code = self.process.returncode
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
    """Some worker processes, started at once: they load their modules while the parent still prepares the work."""

    def __init__(self, number: int):
        self._workers = {worker.connection: worker for worker in map(_Worker, range(number))}

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.process.wait()
            worker.connection.close()

    def open(self, encoder: Hashable) -> None:
        """Let them open an encoder that will most likely be needed; `encoder` opens it when it is called."""
        for worker in self._workers.values():
            worker.send(encoder)

    def run(self, job: Job, queue: TaskQueue) -> Iterator[Tally | ShardResult]:
        """Do every task of the queue, giving progress and results as they come, in no fixed order; once only.

        Raises:
            RunError: a worker died or met an error that was not foreseen.
            OSError: as the worker met it (a full disk, a file that is gone).
            StandInDiffersError: a stand-in for SentencePiece gave other ids.
        """
        from zerokara.tokens.shards import ShardResult

        for worker in self._workers.values():
            worker.send(job)
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


def _python_path() -> str:
    """The package must be found by a process that starts afresh."""
    source_root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([source_root, *filter(None, [os.environ.get("PYTHONPATH")])])
