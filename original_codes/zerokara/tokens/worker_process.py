"""The tokenising processes, and the *nursery*, `python -m zerokara.tokens.worker_process DESCRIPTOR`, that forks them.

The nursery loads the modules and opens the encoders once, and forks a worker whenever it is asked to: a worker begins
with everything loaded, in a millisecond, and shares the memory. Forking is safe in a process without threads, which is
why this is a program of its own: the step itself may have any (for the hashes, for .parquet, for the Hub).

The nursery hears, over the connection that is inherited as DESCRIPTOR: the parent's `sys.path`, then openers of
encoders that will most likely be needed; a `Question`, which it answers; `FORK` with the descriptor of the new worker's
own connection, answered by its process id; and `EndOf` a dead worker, answered by the exit code.
A worker hears a `Job`, and one `Task` after another; it tells tallies while it works and a `ShardResult` for each task,
or what went wrong. Each ends when its connection does.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from zerokara.tokens.messages import FORK, EndOf, Question

_Opened = dict[object, Any]


def main(descriptor: int) -> None:
    """Be the nursery until the connection closes."""
    connection = Connection(descriptor)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has what it wants, or is gone
        sys.path[:] = connection.recv()
        _load()
        _serve(connection, {})


def _load() -> None:
    """Import what workers need."""
    import zerokara.tokenizer.encoder_choice
    import zerokara.tokens.shards  # noqa: F401


def _serve(connection: Connection, opened: _Opened) -> None:
    while True:
        message = connection.recv()
        if message == FORK:
            descriptor = recv_handle(connection)
            gc.freeze()  # what was loaded stays, and need not be looked through again and again, nor copied for that
            pid = os.fork()
            if not pid:
                connection.close()
                _end_after(partial(_work, Connection(descriptor), opened))
            os.close(descriptor)
            connection.send(pid)
        elif isinstance(message, EndOf):
            connection.send(os.waitstatus_to_exitcode(os.waitpid(message.pid, 0)[1]))
        elif getattr(message, "is_question", False):
            connection.send(_answer(message, opened))
        else:
            with suppress(Exception):  # it may never be needed; if it is, opening it tells what is wrong
                opened[message] = opened[message] if message in opened else message()


def _answer(question: Question, opened: _Opened) -> object:
    from zerokara.errors import UserError

    try:
        return question(opened)
    except UserError as error:
        return [str(fault) for fault in error.faults]
    except Exception:
        return traceback.format_exc()


def _end_after(work: Callable[[], None]) -> None:
    """Work, and end this process, without what the nursery would have done."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        from zerokara.errors import redacted

        print(redacted(traceback.format_exc()), file=sys.stderr)
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _work(connection: Connection, opened: _Opened) -> None:
    """Do tasks until the connection closes."""
    from zerokara.corpus.reading import OpenStreams
    from zerokara.errors import UserError
    from zerokara.tokenizer.fast_encoder import FastEncoderDiffersError
    from zerokara.tokens.shards import Job, write_shard

    try:
        job: Job = connection.recv()
        encoder = opened.get(job.open_encoder) or job.open_encoder()
        with OpenStreams() as streams:
            while True:
                connection.send(write_shard(job, connection.recv(), encoder, connection.send, streams))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has what it wants, or is gone
    except OSError as error:
        # Made anew: subclasses of OSError from other packages do not always survive the way to the parent.
        _tell(connection, OSError(error.errno, error.strerror or str(error), error.filename))
    except (FastEncoderDiffersError, UserError) as failure:
        _tell(connection, failure)
    except Exception:  # told to the parent, who raises it: a child's traceback alone would be lost among others
        _tell(connection, traceback.format_exc())


def _tell(connection: Connection, failure: object) -> None:
    with suppress(BrokenPipeError):  # the parent is gone: nobody to tell
        connection.send(failure)


if __name__ == "__main__":
    main(int(sys.argv[1]))
