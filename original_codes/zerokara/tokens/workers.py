"""Worker processes that encode tasks into shards, and threads of the step that unpack what they encode.

The step deals, by a pool of the standard library: it takes tasks from several lanes at once and keeps a few more of
them under way than there are workers. Workers are forked by multiprocessing's fork server, a process without threads
that has imported what they need: they start within milliseconds, and the step itself may have threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

from zerokara.errors import RunError, UserError
from zerokara.tokenizer.fast_encoder import FastEncoderDiffersError
from zerokara.tokens.shards import Job, ShardResult, write_shard
from zerokara.tokens.tasks import Task

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [__name__, "gigatoken"]
"""What the fork server imports; it passes over what is not installed."""
OPEN_LANES = 4
"""Packed files that are unpacked at once; zlib and zstd release the interpreter's lock."""
NAMED_TASKS = 3


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


def run_in_workers(job: Job, lanes: Iterable[Iterator[Task]], num_workers: int) -> Generator[ShardResult, None, None]:
    """Do the tasks of all lanes; yield results as they come, in no fixed order.

    Close the generator to end the workers early (`contextlib.closing`).

    Raises:
        RunError: a worker died or met an unforeseen error.
        OSError: as the worker met it (a full disk, a file that is gone).
        UserError: a file that can never be read.
        FastEncoderDiffersError: the fast encoder gave other ids.
    """
    start_fork_server()
    others, workers = set(multiprocessing.active_children()), set[BaseProcess]()
    pool = ProcessPoolExecutor(num_workers, _CONTEXT, _begin, (job,))
    threads = ThreadPoolExecutor(OPEN_LANES)
    waiting, opened = iter(lanes), list[Iterator[Task]]()
    asked: dict[Future[Any], Iterator[Task]] = {}
    under_way: dict[Future[Any], Task] = {}
    try:
        while True:
            while len(asked) < OPEN_LANES and len(asked) + len(under_way) < num_workers * 3 // 2 + 3:
                lane = opened.pop(0) if opened else next(waiting, None)
                if lane is None:
                    break
                asked[threads.submit(next, lane, None)] = lane
            if not asked and not under_way:
                return
            for future in wait([*asked, *under_way], return_when=FIRST_COMPLETED).done:
                if future in under_way:
                    result = future.result()
                    del under_way[future]  # later, since a death is told with all tasks that were under way
                    yield result
                    continue
                lane, task = asked.pop(future), future.result()
                if task is not None:
                    opened.append(lane)
                    under_way[pool.submit(_do, task)] = task
                    workers |= {*multiprocessing.active_children()} - others
    except BrokenProcessPool:
        pool.shutdown()
        raise _death(workers, list(under_way.values())[:num_workers]) from None
    finally:
        for worker in workers:
            worker.kill()
        pool.shutdown(cancel_futures=True)
        threads.shutdown(cancel_futures=True)


def _death(workers: Iterable[BaseProcess], tasks: Sequence[Task]) -> RunError:
    """The error for a worker that died while some of these tasks were under way."""
    # The pool ends the others by SIGTERM.
    codes = {worker.exitcode or 0 for worker in workers} - {0}
    code = next(iter(codes - {-signal.SIGTERM}), -signal.SIGTERM)
    remedy = ""
    cause = f"exit code {code}"
    if code < 0:
        cause = f"killed by {signal.Signals(-code).name}"
        remedy = "; most often the machine ran out of memory: run again with fewer processes (--set num_workers=1)"
    firsts = [task.parts[0] for task in tasks[:NAMED_TASKS]]
    places = [f"{first.file.name}, from byte {first.start:,}" for first in firsts]
    more = f", and {len(tasks) - NAMED_TASKS} more" if tasks[NAMED_TASKS:] else ""
    return RunError(
        f"a tokenising process died ({cause}) at one of: {'; '.join(places)}{more}. Finished shards are kept, and the "
        f"same command resumes{remedy}"
    )


_job: Job


def _begin(job: Job) -> None:
    """Prepare a worker process."""
    global _job
    _job = job
    threading.Thread(target=_end_with_step, daemon=True).start()


def _do(task: Task) -> ShardResult:
    """Do a task in a worker process."""
    try:
        return write_shard(_job, task)
    except OSError as error:
        # Rebuilt, because subclasses of OSError from other packages do not always survive pickling.
        raise OSError(error.errno, error.strerror or str(error), error.filename) from None
    except (FastEncoderDiffersError, UserError):
        raise
    except Exception as error:  # The traceback of a child alone would be lost among others.
        raise RunError(f"a tokenising process met an unforeseen error:\n{traceback.format_exc()}") from error


def _end_with_step() -> None:
    """End this process as soon as the step is gone.

    The kernel's parent-death signal does not serve here: the parent is the fork server, which outlives the step for as
    long as there are workers.
    """
    step = multiprocessing.parent_process()
    assert step is not None
    step.join()
    os._exit(1)
