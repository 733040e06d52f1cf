"""The life of one tokenising process: `python -m zerokara.tokens.worker_process DESCRIPTOR`.

A program of its own and no `multiprocessing.Process`, which would first import again all that the step has imported.
In, over the connection that is inherited as DESCRIPTOR: the parent's `sys.path`; then, in any order, openers of
encoders that will most likely be needed, a `Job`, and one `Task` after another. Out: tallies while it works and a
`ShardResult` for each task, or what went wrong. It ends when the connection does.
"""

from __future__ import annotations

import gc
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


def main(descriptor: int) -> None:
    """Open the tokenizer, then do tasks until the connection closes."""
    connection = Connection(descriptor)
    try:
        sys.path[:] = connection.recv()
        _work(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has what it wants, or is gone
    except Exception:  # told to the parent, who raises it: a child's traceback alone would be lost among others
        _tell(connection, traceback.format_exc())


def _work(connection: Connection) -> None:
    from zerokara.corpus.reading import OpenStreams
    from zerokara.tokenizer.stand_in import StandInDiffersError
    from zerokara.tokens.shards import Job, write_shard
    from zerokara.tokens.tasks import Task

    opened: dict[object, Any] = {}
    job: Job | None = None
    try:
        with OpenStreams() as streams:
            while True:
                message = connection.recv()
                if isinstance(message, Job):
                    job = message
                    if job.open_encoder not in opened:
                        opened[job.open_encoder] = job.open_encoder()
                    gc.freeze()  # what was loaded stays, and need not be looked through again and again
                elif isinstance(message, Task):
                    assert job is not None
                    encoder = opened[job.open_encoder]
                    connection.send(write_shard(job, message, encoder, connection.send, streams))
                else:
                    with suppress(Exception):  # it may never be needed; if it is, opening it tells what is wrong
                        opened[message] = message()
    except (BrokenPipeError, ConnectionResetError):
        raise
    except OSError as error:
        # Made anew: subclasses of OSError from other packages do not always survive the way to the parent.
        _tell(connection, OSError(error.errno, error.strerror or str(error), error.filename))
    except StandInDiffersError as difference:
        _tell(connection, difference)


def _tell(connection: Connection, failure: object) -> None:
    with suppress(BrokenPipeError):  # the parent is gone: nobody to tell
        connection.send(failure)


if __name__ == "__main__":
    main(int(sys.argv[1]))
