"""The step that waits for a cluster: deals the work into parts, has them run, and takes the shards as they appear.

Scheduler and machines report nothing: what counts is the shards in the work folder. A part that is no longer known to
the scheduler and has left tasks undone was lost with its machine, and is started again: it costs its unfinished shards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path

from zerokara.errors import RunError
from zerokara.progress import log, plural
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.fast_encoder import FastEncoder
from zerokara.tokens import work_folder
from zerokara.tokens.cluster import reports
from zerokara.tokens.cluster.parts import Part, Tokenizer, deal, numbers_in, part_path
from zerokara.tokens.cluster.scheduler import Scheduler, SilentSchedulerError
from zerokara.tokens.shards import Job, ShardResult, Tally, shard_path
from zerokara.tokens.tasks import TaskQueue, place_of

POLL_SECONDS = 0.5
"""Between two looks into the work folder."""
ASK_SECONDS = 5.0
"""Between two questions to the scheduler."""
GRACE_SECONDS = 10.0
"""A file that another machine has written may be seen as much later (NFS keeps the lists of folders)."""
QUEUE_SECONDS = 15.0
"""After which it is told that nothing has started yet."""
MAX_STARTS = 4
"""Of a part that finishes nothing."""


def runner(scheduler: Scheduler, num_parts: int) -> Callable[..., Generator[Tally | ShardResult]]:
    """Return what does the tasks of a queue on a cluster, in the place of `run_in_workers`."""

    def run(job: Job, queue: TaskQueue, num_workers: int) -> Generator[Tally | ShardResult, None, None]:
        del num_workers  # of this machine
        parts = _adopted(scheduler, job.folder)
        if is_adopted := bool(parts):
            log(f"  {scheduler.name}: {plural(len(parts), 'part')} of an earlier start are still at work")
        else:
            parts = _dealt(scheduler, job, queue, num_parts)
            first_log = part_path(job.folder, parts[0].number, "log")
            log(f"  {scheduler.name}: {plural(len(parts), 'part')}; what each prints: {first_log} …")
        try:
            if not is_adopted:
                scheduler.start(job.folder, [part.number for part in parts])
            yield from _Waiting(scheduler, job.folder, queue, parts).results()
        finally:
            scheduler.end(job.folder)

    return run


def _dealt(scheduler: Scheduler, job: Job, queue: TaskQueue, num_parts: int) -> list[Part]:
    scheduler.end(job.folder)
    for path in job.folder.glob("part-*"):
        path.unlink()
    assert isinstance(job.encoder, Encoder | FastEncoder)
    tokenizer = Tokenizer.of(job.encoder)
    parts = [
        Part(number, tokenizer, job.text_field, job.txt_document, scheduler.num_workers, tasks)
        for number, tasks in enumerate(deal(queue.left, num_parts))
    ]
    for part in parts:
        part.write(job.folder)
    return parts


def _adopted(scheduler: Scheduler, folder: Path) -> list[Part]:
    """The parts of a step that was killed, if some are still at work: its plan was this one's, or they were ended."""
    if not scheduler.at_work(folder):
        return []
    with suppress(OSError, ValueError, TypeError, KeyError):  # unreadable: they are ended
        return [Part.read(folder, number) for number in numbers_in(folder)]
    return []


class _Waiting:
    """What is waited for."""

    def __init__(self, scheduler: Scheduler, folder: Path, queue: TaskQueue, parts: Sequence[Part]):
        self._scheduler, self._folder, self._queue = scheduler, folder, queue
        self._queues = {part.number: TaskQueue(part.tasks) for part in parts}
        self._at_work = set(self._queues)  # until the scheduler is asked
        self._began = self._asked_at = time.monotonic()
        self._is_told_to_wait = False
        self._silence = ""
        self._missed_at: dict[int, float] = {}
        """When a part that has tasks left was first not at work."""
        self._starts = dict.fromkeys(self._queues, 1)
        for name in queue.done:
            self._note(name, name in queue.ends)

    def results(self) -> Generator[Tally | ShardResult, None, None]:
        """Yield results as they appear, each after its tally, until everything is done."""
        while True:
            now = time.monotonic()
            if now - self._asked_at > ASK_SECONDS:
                self._ask(now)
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in entries]
            self._tell_of_queue(names, now)
            for result in self._news(names):
                self._queue.take_over(result.name, result.at_end)
                self._note(result.name, result.at_end)
                yield result.done
                yield result
            reports.raise_error(self._folder, names)
            left = {number for number, queue in self._queues.items() if not queue.is_empty}
            if not left and not self._at_work:
                break
            if not self._silence:
                self._start_lost(left - self._at_work, now)
            time.sleep(POLL_SECONDS)
        if not self._queue.is_empty:
            raise RunError("all parts are done, and tasks are left: a bug in zerokara. The same command does the rest")

    def _tell_of_queue(self, names: Sequence[str], now: float) -> None:
        """Say that all parts wait for a machine, which may take hours, and when the first one does no more."""
        has_started = any(name.startswith("part-") and name.endswith(".log") for name in names)
        if has_started and self._is_told_to_wait:
            log(f"  {self._scheduler.name}: the first part has started")
            self._is_told_to_wait, self._began = False, float("inf")
        elif not has_started and not self._is_told_to_wait and now - self._began > QUEUE_SECONDS:
            log(f"  {self._scheduler.name}: all parts wait for a machine")
            self._is_told_to_wait = True

    def _ask(self, now: float) -> None:
        self._asked_at = now
        try:
            self._at_work = self._scheduler.at_work(self._folder)
            self._silence = ""
        except SilentSchedulerError as error:  # nothing is lost by waiting for it
            if not self._silence:
                log(f"  {error}; waiting for it")
            self._silence = str(error)
            self._missed_at.clear()

    def _note(self, name: str, at_end: bool) -> None:
        for number, queue in self._queues.items():
            if queue.has(name):
                queue.take_over(name, at_end)
                self._starts[number] = 1
                return

    def _news(self, names: Sequence[str]) -> list[ShardResult]:
        """The shards that have appeared among these files, whole."""
        found = []
        for name in sorted(name.removesuffix(".json") for name in names if name.endswith(".json")):
            with suppress(ValueError):
                place_of(name)
                if name in self._queue.done:
                    continue
                result = work_folder.read_result(shard_path(self._folder, name, "json"))
                if result is not None and self._is_there(result):
                    found.append(result)
        return found

    def _is_there(self, result: ShardResult) -> bool:
        with suppress(FileNotFoundError):
            sizes = {ending: shard_path(self._folder, result.name, ending).stat().st_size for ending in result.files}
            return all(sizes[ending] == size for ending, (size, _) in result.files.items())
        return False

    def _start_lost(self, missing: set[int], now: float) -> None:
        """Start parts again that are not at work and have tasks left.

        Raises:
            RunError: one has been started often enough, and has finished nothing.
        """
        self._missed_at = {number: self._missed_at.get(number, now) for number in missing}
        lost = sorted(number for number, since in self._missed_at.items() if now - since > GRACE_SECONDS)
        if not lost:
            return
        for number in lost:
            if self._starts[number] >= MAX_STARTS:
                log_path = part_path(self._folder, number, "log")
                raise RunError(
                    f"part {number} has been started {MAX_STARTS} times and has ended without a word each time: see "
                    f"{log_path}. Where it is not there, the machines do not see this folder: output_prefix must name "
                    "a place that all of them share. Finished shards are kept, and the same command goes on"
                )
            self._starts[number] += 1
            self._missed_at.pop(number)
        text = ", ".join(map(str, lost[:10])) + (", …" if lost[10:] else "")
        what = f"{plural(len(lost), 'part')} ended before the work was done"
        log(f"  {self._scheduler.name}: {what}; starting again: {text}")
        self._scheduler.start(self._folder, lost)
        self._at_work |= set(lost)
