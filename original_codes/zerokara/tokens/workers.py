"""Worker processes that turn tasks into shards, each over a pipe of its own.

One pipe a worker, and no shared queue or lock: whatever a worker dies of (out of memory, kill -9), the others and the
parent see nothing worse than the end of its pipe. A worker whose parent is gone ends by itself at its next message.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from zerokara.errors import RunError
from zerokara.tokens.shards import Job, ShardResult, Tally, Task, write_shard

Message = Tally | ShardResult | OSError | str
"""Progress, a finished shard, an error of the operating system, or the traceback of anything else."""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_tasks(job: Job, tasks: Sequence[Task], num_workers: int) -> Iterator[Tally | ShardResult]:
    """Run every task in `num_workers` processes, giving progress and results as they come, in no fixed order.

    Raises:
        RunError: a worker died or met an error that was not foreseen.
        OSError: as the worker met it (a full disk, a file that is gone).
    """
    # The largest first, or one big .gz begun last would keep everyone waiting.
    waiting = deque(sorted(tasks, key=lambda task: -task.bytes))
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, Any] = {}
    at_work: dict[Connection, Task] = {}
    try:
        for number in range(min(num_workers, len(tasks))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, job), name=f"tokenise-{number}", daemon=True)
            with _without_ctrl_c():
                process.start()
            theirs.close()
            processes[ours] = process
            _assign(ours, waiting, at_work)
        while at_work:
            for connection in wait(list(at_work)):
                assert isinstance(connection, Connection)
                message = _receive(connection, processes[connection], at_work[connection])
                if isinstance(message, ShardResult):
                    del at_work[connection]
                    _assign(connection, waiting, at_work)
                yield message
    finally:
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.join()


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Let a process be born with Ctrl-C blocked: it reaches the parent, who ends the others.

    A blocked signal stays so in a new process, from its first moment on; a handler set there would come too late.
    """
    resource_tracker.ensure_running()  # Starting it unblocks SIGINT (Python 3.11), so it starts first.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _assign(connection: Connection, waiting: deque[Task], at_work: dict[Connection, Task]) -> None:
    if waiting:
        at_work[connection] = waiting.popleft()
        with suppress(BrokenPipeError):  # It is dead; its pipe tells so when it is read next.
            connection.send(at_work[connection])


def _receive(connection: Connection, process: Any, task: Task) -> Tally | ShardResult:
    try:
        message: Message = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join(timeout=5)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
            why = "Most often the machine ran out of memory: run again with fewer processes (--set num_workers=1)"
        else:
            how, why = f"exit code {code}", "What it said stands above"
        first = task.ranges[0]
        raise RunError(
            f"a tokenising process died ({how}) at {first.file.path}, from byte {first.start:,}; "
            f"nothing was written. {why}"
        ) from None
    if isinstance(message, OSError):
        raise message
    if isinstance(message, str):
        raise RunError(f"a tokenising process met an error that was not foreseen:\n{message}")
    return message


def _work(connection: Connection, job: Job) -> None:
    """The life of a worker: open the tokenizer, then do tasks until the pipe closes."""
    try:
        encoder = job.open_encoder()
        while True:
            task: Task = connection.recv()
            connection.send(write_shard(job, task, encoder, connection.send))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except OSError as error:
        _tell(connection, OSError(error.errno, error.strerror, error.filename))
    except Exception:  # Told to the parent, who raises it: a child's traceback alone would be lost among others.
        _tell(connection, traceback.format_exc())


def _tell(connection: Connection, failure: Message) -> None:
    with suppress(BrokenPipeError):  # The parent is gone: nobody to tell.
        connection.send(failure)
