"""Worker processes that encode tasks into shards, each over a connection of its own.

Workers are forked by multiprocessing's fork server, a process without threads that has imported what they need: they
start within milliseconds, and the step itself may have threads (for hashes, .parquet files, the Hub). There is one
connection per worker and no shared queue or lock, so that a worker that dies (out of memory, kill -9) can block nobody:
the step sees the end of its connection.

A worker receives one `Task` after another. It sends tallies while it works, then a `ShardResult`, or the error that it
met.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Generator
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait

from zerokara.corpus.lines import OpenStreams
from zerokara.errors import RunError, UserError
from zerokara.tokenizer.fast_encoder import FastEncoderDiffersError
from zerokara.tokens.shards import Job, ShardResult, Tally, write_shard
from zerokara.tokens.tasks import Task, TaskQueue

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [__name__, "gigatoken"]
"""What the fork server imports; it passes over what is not installed."""


def start_fork_server() -> None:
    """Start the fork server, so that it imports while the step prepares; the first worker starts it otherwise."""
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    # Ctrl-C reaches every process of a terminal's foreground group. It is meant for the step, which ends the others:
    # what is ignored here stays ignored in the server and in its workers.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, previous)


def run_in_workers(job: Job, queue: TaskQueue, num_workers: int) -> Generator[Tally | ShardResult, None, None]:
    """Do every task of the queue; yield progress and results as they come, in no fixed order.

    Close the generator to end the workers early (`contextlib.closing`).

    Raises:
        RunError: a worker died or met an unforeseen error.
        OSError: as the worker met it (a full disk, a file that is gone).
        UserError: a file that can never be read.
        FastEncoderDiffersError: the fast encoder gave other ids.
    """
    start_fork_server()
    workers: dict[Connection, _Worker] = {}
    try:
        for number in range(num_workers):
            worker = _Worker(number, job)
            workers[worker.connection] = worker
            worker.begin(queue.next(number))
        while busy := [worker.connection for worker in workers.values() if worker.task is not None]:
            for connection in wait(busy):
                assert isinstance(connection, Connection)
                worker = workers[connection]
                message = worker.receive()
                if isinstance(message, ShardResult):
                    assert worker.task is not None
                    queue.finished(worker.task, message.at_end)
                    worker.begin(queue.next(worker.number))
                yield message
    finally:
        for worker in workers.values():
            worker.kill()


class _Worker:
    """A worker process, as the step sees it."""

    def __init__(self, number: int, job: Job):
        self.number = number
        self.task: Task | None = None
        """The task at hand; None when it has none left."""
        self.connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_work, args=(theirs, job), daemon=True)
        with theirs:
            self._process.start()

    def begin(self, task: Task | None) -> None:
        """Send its next task, if any."""
        self.task = task
        if task is not None:
            with suppress(BrokenPipeError, ConnectionResetError):  # It is dead, which `receive` will report.
                self.connection.send(task)

    def receive(self) -> Tally | ShardResult:
        """Return its next message, or raise the error that it sent."""
        try:
            message: Tally | ShardResult | Exception | str = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        if isinstance(message, Exception):
            raise message
        if isinstance(message, str):
            raise RunError(f"a tokenising process met an unforeseen error:\n{message}")
        return message

    def kill(self) -> None:
        """End it; it writes nothing from then on."""
        self._process.kill()
        self._process.join()
        self.connection.close()

    def _death(self) -> RunError:
        self._process.join()
        code = self._process.exitcode
        if code is not None and code < 0:
            cause = f"killed by {signal.Signals(-code).name}"
            remedy = "Most often the machine ran out of memory: run again with fewer processes (--set num_workers=1)"
        else:
            cause, remedy = f"exit code {code}", "Its own output stands above"
        assert self.task is not None
        first = self.task.ranges[0]
        return RunError(
            f"a tokenising process died ({cause}) at {first.file.name}, from byte {first.start:,}; finished shards are "
            f"kept, and the same command resumes. {remedy}"
        )


def _work(connection: Connection, job: Job) -> None:
    """Do tasks until the connection closes; what a worker process runs."""
    threading.Thread(target=_end_with_step, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # The step has what it wants, or is gone.
        try:
            with OpenStreams() as streams:
                while True:
                    connection.send(write_shard(job, connection.recv(), connection.send, streams))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except OSError as error:
            # Rebuilt, because subclasses of OSError from other packages do not always survive pickling.
            connection.send(OSError(error.errno, error.strerror or str(error), error.filename))
        except (FastEncoderDiffersError, UserError) as error:
            connection.send(error)
        except Exception:  # Raised by the step: the traceback of a child alone would be lost among others.
            connection.send(traceback.format_exc())


def _end_with_step() -> None:
    """End this process as soon as the step is gone.

    The kernel's parent-death signal does not serve here: the parent is the fork server, which outlives the step for as
    long as there are workers.
    """
    step = multiprocessing.parent_process()
    assert step is not None
    step.join()
    os._exit(1)
