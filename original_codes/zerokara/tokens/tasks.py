"""The corpus cut into tasks, and which worker does which next.

A task becomes one shard: consecutive ranges of one source, of about `task_bytes` of text. Tasks of plain files are
known beforehand. A packed file (.gz, .zst) of lines is a *stream*, whose length is unknown until it is unpacked, so its
tasks are the blocks [0, B), [B, 2B), … of the unpacked text, handed out until one meets the end. Each worker on a
stream unpacks all of it and encodes only its own blocks, which pays because unpacking is several times as fast as
encoding. So a worker stays on its stream, and joins another worker's only when nothing else is left.

Task names sort in the order of the corpus.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from zerokara.corpus.documents import TxtDocument
from zerokara.corpus.find import InputFile
from zerokara.corpus.read import Range, has_unknown_size, ranges
from zerokara.resources import available_cores

if TYPE_CHECKING:  # what the fork server imports leaves out the classes of the configuration
    from zerokara.config.data import DataSettings


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
class Stream:
    """A packed file, whose blocks are handed out one after another: all of them, or one in every `step`."""

    index: int
    """Of the file in the corpus."""
    file: InputFile
    block_bytes: int
    first: int = 0
    """Number of the first block."""
    step: int = 1
    blocks: dict[int, Task] = field(default_factory=dict)
    """Blocks that are done or handed out, by their start."""
    next_start: int = field(init=False)
    """Start of the first block that is neither."""
    end: int | None = None
    """Start of the first block that met the end of the file, if known."""
    num_workers: int = 0

    def __post_init__(self) -> None:
        self.next_start = self.first * self.block_bytes
        self._pass_over_done()

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
        self._pass_over_done()
        return self.blocks[start]

    def every(self, step: int) -> list[Stream]:
        """Cut a stream that nobody works on into so many: each has one of `step` blocks, and knows what is done."""
        assert self.step == 1
        return [
            replace(
                self,
                first=first,
                step=step,
                blocks={s: t for s, t in self.blocks.items() if self._is_of(s, first, step)},
            )
            for first in range(step)
        ]

    def has(self, start: int) -> bool:
        """Whether the block that begins here is one of these."""
        return self._is_of(start, self.first, self.step)

    def _is_of(self, start: int, first: int, step: int) -> bool:
        return start // self.block_bytes % step == first

    def _pass_over_done(self) -> None:
        while self.next_start in self.blocks:
            self.next_start += self.step * self.block_bytes


class TaskQueue:
    """Hands out the tasks that are not done yet."""

    def __init__(self, parts: Iterable[Task | Stream], done: Collection[str] = (), ended_streams: Collection[str] = ()):
        """`parts` are as `cut` gives them: tasks, and streams with a file each, which this queue changes.

        `done` names tasks of an earlier run, `ended_streams` those among them that met the end of a stream.
        """
        self._streams: dict[int, Stream] = {}
        self._stream_of: dict[int, Stream] = {}
        self._known: dict[str, Task] = {}
        for part in parts:
            if isinstance(part, Stream):
                self._streams[part.index] = part
            else:
                self._known[part.name] = part
        self._waiting = dict(self._known)
        self.done: set[str] = set()
        """Names of the tasks that are done."""
        self.ends: set[str] = set()
        """Names of those that met the end of their stream."""
        for name in done:
            self.take_over(name, name in ended_streams)

    @property
    def tasks(self) -> list[Task]:
        """All tasks handed out or done, in the order of the corpus."""
        blocks = (task for stream in self._streams.values() for task in stream.blocks.values())
        return sorted([*self._known.values(), *blocks], key=lambda task: task.name)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to hand out."""
        return not self._waiting and all(stream.ended for stream in self._streams.values())

    @property
    def left(self) -> list[Task | Stream]:
        """What is left to hand out."""
        return [*self._waiting.values(), *(stream for stream in self._streams.values() if not stream.ended)]

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
                return self._waiting.pop(next(iter(self._waiting)))
            if current is None:
                return None
            current.num_workers += 1
            self._stream_of[worker] = current
        return current.block(current.next_start)

    def finished(self, task: Task, at_end: bool) -> None:
        """Note that a task is done, and whether it met the end of its file."""
        self.done.add(task.name)
        if at_end and task.name not in self._known:
            self.ends.add(task.name)
            index, start = place_of(task.name)
            self._streams[index].ends_at(start)

    def take_over(self, name: str, at_end: bool) -> None:
        """Note that a task was done elsewhere, which is not handed out any more."""
        if name in self._known:
            self._waiting.pop(name, None)
            self.done.add(name)
            return
        index, start = place_of(name)
        self.finished(self._streams[index].block(start), at_end)

    def has(self, name: str) -> bool:
        """Whether a task of this name is one of these."""
        if name in self._known:
            return True
        index, start = place_of(name)
        return index in self._streams and self._streams[index].has(start)


def cut(files: Sequence[InputFile], task_bytes: int, txt_document: TxtDocument = "file") -> Iterator[Task | Stream]:
    """Group consecutive ranges of one source into tasks; yield each stream by itself.

    Raises:
        OSError: the footer of a .parquet cannot be read from the disk or the network.
    """
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
            yield Stream(index, file, task_bytes)
            continue
        for range_ in ranges([file], task_bytes, txt_document):
            if gathered and (size + range_.disk_bytes > task_bytes or gathered[0].file.source != range_.file.source):
                yield from task()
            if not gathered:
                first, size = index, 0
            gathered.append(range_)
            size += range_.disk_bytes
    yield from task()


def place_of(name: str) -> tuple[int, int]:
    """Index of the first file and start of its range, of the task of this name."""
    index, start = name.split("-")
    return int(index), int(start)


def _name(file_index: int, start: int) -> str:
    return f"{file_index:07d}-{start:015d}"
