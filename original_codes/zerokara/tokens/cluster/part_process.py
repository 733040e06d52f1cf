"""`python -m zerokara.tokens.cluster.part_process FOLDER NUMBER`: one part of step 2, on one machine of a cluster.

It encodes with worker processes, as step 2 does on one machine, and leaves finished shards in the work folder, which
all machines share. What is there already it does not do again, so a scheduler may start it as often as it likes.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from zerokara.errors import shown
from zerokara.hashing import BackgroundHashes
from zerokara.progress import log, plural
from zerokara.resources import available_cores, end_with_parent
from zerokara.tokens.cluster import reports
from zerokara.tokens.cluster.parts import Part
from zerokara.tokens.corpus_content import FileRecord
from zerokara.tokens.shards import Job, ShardResult
from zerokara.tokens.tasks import TaskQueue, place_of
from zerokara.tokens.work_folder import read_result
from zerokara.tokens.workers import run_in_workers

ENDS_WITH_PARENT = "ZEROKARA_ENDS_WITH_PARENT"
"""Set by whoever must not leave this process behind."""


def main(argv: Sequence[str]) -> int:
    """Do a part; the exit code."""
    if os.environ.get(ENDS_WITH_PARENT):
        end_with_parent(os.getppid())
    folder, number = Path(argv[0]), int(argv[1])
    try:
        _work(folder, Part.read(folder, number))
        return 0
    except Exception as error:
        traceback.print_exc()
        reports.tell_error(folder, number, error)
        return 1


def _work(folder: Path, part: Part) -> None:
    queue = TaskQueue(part.tasks)
    for path in folder.glob("*-*.json"):
        # Of a damaged result the step asks again.
        if _is_task(path) and queue.has(path.stem) and (result := read_result(path)) is not None:
            queue.take_over(result.name, result.at_end)
    if queue.is_empty:
        log(f"part {part.number} on {socket.gethostname()}: everything is done")
        return
    job = Job(part.tokenizer.open(), folder, part.text_field, part.txt_document, is_synced=True)
    local = [file for file in part.files if file.remote is None]
    differing = reports.check_corpus({file.path: FileRecord.of(file) for file in local})
    records = {shown(file.path.resolve()): FileRecord.of(file) for file in local}
    num_workers = part.num_workers or cores_here()
    log(f"part {part.number} on {socket.gethostname()}: {plural(num_workers, 'worker')}")
    with BackgroundHashes(differing) as hashes:
        with closing(run_in_workers(job, queue, num_workers)) as messages:
            num_shards = sum(isinstance(message, ShardResult) for message in messages)
        if differing:
            reports.tell_hashes(folder, part.number, hashes.result(), records)
    log(f"part {part.number} on {socket.gethostname()}: {plural(num_shards, 'shard')} finished")


def cores_here() -> int:
    """Cores that this process may use: Slurm does not everywhere bind a job to those that it was given."""
    given = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return min(available_cores(), int(given)) if given.isdecimal() else available_cores()


def _is_task(path: Path) -> bool:
    try:
        place_of(path.stem)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
