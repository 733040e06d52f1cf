"""The corpus cut into tasks, and which worker does which next.

A task becomes one shard: consecutive ranges of one source, of about `task_bytes` of text. Tasks of plain files are
known beforehand. A packed file (.gz, .zst) of lines is a *stream*, whose length is unknown until it is unpacked, so its
tasks are the blocks [0, B), [B, 2B), … of the unpacked text, handed out until one meets the end. Each worker on a
stream unpacks all of it and encodes only its own blocks, which pays because unpacking is several times as fast as
encoding. So a worker stays on its stream, and joins another worker's only when nothing else is left.

Task names sort in the order of the corpus.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerokara.corpus.documents import TxtDocument
from zerokara.corpus.inputs import InputFile
from zerokara.corpus.reading import Range, has_unknown_size, ranges
from zerokara.resources import available_cores

if TYPE_CHECKING:  # what the fork server imports leaves out the classes of the configuration
    from zerokara.config.data_settings import DataSettings


MIN_TASK_BYTES = 1024 * 1024
MAX_TASK_BYTES = 32 * 1024 * 1024
TASKS_A_WORKER = 16
"""Enough that all workers finish at about the same time."""
PACKED_FACTOR = 8
"""Bytes of text that a byte of a packed file is assumed to hold at most."""


def num_workers(config: DataSettings, files: Sequence[InputFile] = ()) -> int:
    """Worker processes, with `auto` resolved to one a core, but no more than there can be tasks for these files."""
    wanted = available_cores() if config.num_workers == "auto" else config.num_workers
    most = sum(file.bytes * (PACKED_FACTOR if file.is_packed else 1) for file in files) // MIN_TASK_BYTES + 1
    return min(wanted, most) if files else wanted


def usual_task_bytes(config: DataSettings, corpus_bytes: int) -> int:
    """Unpacked text per task, where files can be cut, in bytes."""
    return min(max(corpus_bytes // (num_workers(config) * TASKS_A_WORKER), MIN_TASK_BYTES), MAX_TASK_BYTES)


@dataclass(frozen=True)
class Task:
    """Consecutive ranges of one source that become one shard."""

    name: str
    """``<index of the first file>-<start of its range>``."""
    source: int
    ranges: tuple[Range, ...]


@dataclass
class _Stream:
    """A packed file, whose blocks are handed out one after another."""

    index: int
    file: InputFile
    block_bytes: int
    blocks: dict[int, Task] = field(default_factory=dict)
    """Blocks that are done or handed out, by their start."""
    next_start: int = 0
    """Start of the first block that is neither."""
    end: int | None = None
    """Start of the first block that met the end of the file, if known."""
    num_workers: int = 0

    @property
    def ended(self) -> bool:
        """Whether no block is left to hand out: an earlier run may have met the end and lack a block before it."""
        return self.end is not None and self.next_start > self.end

    def ends_at(self, start: int) -> None:
        """Note that the block that begins here met the end, or lies behind it."""
        self.end = start if self.end is None else min(self.end, start)

    def block(self, start: int) -> Task:
        """The block that begins here, which is done or handed out from now on."""
        range_ = Range(self.file, start, start + self.block_bytes)
        self.blocks[start] = Task(_name(self.index, start), self.file.source, (range_,))
        while self.next_start in self.blocks:
            self.next_start += self.block_bytes
        return self.blocks[start]


class TaskQueue:
    """Hands out the tasks that are not done yet."""

    def __init__(
        self,
        files: Sequence[InputFile],
        task_bytes: int,
        txt_document: TxtDocument = "file",
        done: Collection[str] = (),
        ended_streams: Collection[str] = (),
    ):
        """`done` names tasks of an earlier run, `ended_streams` those among them that met the end of a stream."""
        self._streams: dict[int, _Stream] = {}
        self._stream_of: dict[int, _Stream] = {}
        self._known: dict[str, Task] = {}
        for part in _tasks_and_streams(files, task_bytes, txt_document):
            if isinstance(part, _Stream):
                self._streams[part.index] = part
            else:
                self._known[part.name] = part
        self._waiting = deque(task for task in self._known.values() if task.name not in done)
        for name in done:
            if name not in self._known:
                index, start = (int(number) for number in name.split("-"))
                self.finished(self._streams[index].block(start), name in ended_streams)

    @property
    def tasks(self) -> list[Task]:
        """All tasks handed out or done, in the order of the corpus."""
        blocks = (task for stream in self._streams.values() for task in stream.blocks.values())
        return sorted([*self._known.values(), *blocks], key=lambda task: task.name)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to hand out."""
        return not self._waiting and all(stream.ended for stream in self._streams.values())

    def next(self, worker: int) -> Task | None:
        """The next task for a worker; None when all are handed out."""
        current = self._stream_of.get(worker)
        if current is not None and current.ended:
            current.num_workers -= 1
            del self._stream_of[worker]
            current = None
        if current is None:
            unfinished = [stream for stream in self._streams.values() if not stream.ended]
            current = min(unfinished, key=lambda stream: stream.num_workers, default=None)
            if self._waiting and (current is None or current.num_workers):
                return self._waiting.popleft()
            if current is None:
                return None
            current.num_workers += 1
            self._stream_of[worker] = current
        return current.block(current.next_start)

    def finished(self, task: Task, at_end: bool) -> None:
        """Note that a task is done, and whether it met the end of its file."""
        if at_end and task.name not in self._known:
            index, start = (int(number) for number in task.name.split("-"))
            self._streams[index].ends_at(start)


def _tasks_and_streams(
    files: Sequence[InputFile], task_bytes: int, txt_document: TxtDocument
) -> Iterator[Task | _Stream]:
    """Group consecutive ranges of one source into tasks; yield each stream by itself."""
    gathered: list[Range] = []
    size = first = 0

    def task() -> Iterator[Task]:
        if gathered:
            yield Task(_name(first, gathered[0].start), gathered[0].file.source, tuple(gathered))
            gathered.clear()

    for index, file in enumerate(files):
        # A smaller packed file is one task at most.
        if has_unknown_size(file, txt_document) and file.bytes * PACKED_FACTOR > task_bytes:
            yield from task()
            yield _Stream(index, file, task_bytes)
            continue
        for range_ in ranges([file], task_bytes, txt_document):
            if gathered and (size + range_.bytes > task_bytes or gathered[0].file.source != range_.file.source):
                yield from task()
            if not gathered:
                first, size = index, 0
            gathered.append(range_)
            size += range_.bytes
    yield from task()


def _name(file_index: int, start: int) -> str:
    return f"{file_index:07d}-{start:015d}"
