"""The corpus cut into tasks, by the files and the size of a task alone, and the tasks of each part of the work.

A task becomes one shard. Plain files, and small compressed ones, are cut into ranges beforehand: a task is consecutive
ranges of one source, of about `task_bytes` of text. Blocks of a larger compressed file (.gz, .zst) of lines are known
only as it is unpacked: each is a task, and says where the next begins. Names of tasks sort in the order of the corpus.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from zerokara.base.resources import available_cores
from zerokara.config.data import DataSettings
from zerokara.corpus.documents import TxtDocument
from zerokara.corpus.find import InputFile
from zerokara.corpus.read import Range, blocks, gathered, has_unknown_size, ranges
from zerokara.tokens.shards import ShardResult, ShardTask

MIN_TASK_BYTES = 1024 * 1024
MAX_TASK_BYTES = 32 * 1024 * 1024
MAX_BLOCK_BYTES = 8 * 1024 * 1024
"""The step holds one and a half blocks for each worker, each worker one or two."""
TASKS_A_WORKER = 16
"""Enough that all workers finish at about the same time."""
COMPRESSION_FACTOR = 8
"""Bytes of text that a byte of a compressed file is assumed to hold at most."""
MANY_FILES = 256
"""Number of compressed files of equal size from which on each is read, and unpacked, whole by a worker."""
MAX_WHOLE_BYTES = 64 * 1024 * 1024
"""Maximum size of a compressed file that is read whole: an interruption costs the shard."""


class Part(NamedTuple):
    """A part of the work, for one machine of several."""

    number: int = 0
    """Counted from 0."""
    num_parts: int = 1

    def __str__(self) -> str:
        return f"{self.number}-of-{self.num_parts}"


WHOLE = Part()


def num_workers(config: DataSettings, files: Sequence[InputFile] = ()) -> int:
    """Number of worker processes: `auto` is one a core, but no more than there can be tasks for these files."""
    wanted = available_cores() if config.num_workers == "auto" else config.num_workers
    most = sum(file.bytes * (COMPRESSION_FACTOR if file.is_compressed else 1) for file in files) // MIN_TASK_BYTES + 1
    return min(wanted, most) if files else wanted


def usual_task_bytes(config: DataSettings, corpus_bytes: int) -> int:
    """Unpacked text per task, where files can be cut, in bytes."""
    return min(max(corpus_bytes // (num_workers(config) * TASKS_A_WORKER), MIN_TASK_BYTES), MAX_TASK_BYTES)


def input_streams(
    files: Sequence[InputFile], task_bytes: int, txt_document: TxtDocument, part: Part, done: Mapping[str, ShardResult]
) -> tuple[list[Iterator[ShardTask]], int]:
    """Tasks of a part that are not done, and bytes of the corpus that they take (of blocks of parts an estimate).

    Tasks are to be taken from all iterators at once, for each unpacks one file. Parts take the known tasks by turn, and
    whole compressed files if there are enough, else the blocks of each by turn. Raises OSError as `ranges`, and from
    the iterators as `blocks`.
    """
    items, of_each = list(_cut(files, task_bytes, txt_document)), part
    known = [item for item in items if isinstance(item, ShardTask)]
    streams = [item for item in items if not isinstance(item, ShardTask)]
    if len(streams) >= part.num_parts:
        streams, of_each = streams[part.number :: part.num_parts], WHOLE
    mine = [task for task in known[part.number :: part.num_parts] if task.name not in done]
    left, input_streams = sum(held.disk_bytes for task in mine for held in task.ranges), [iter(mine)]
    for index, file in streams:
        *finished, last = _blocks_done(index, done)
        if last not in done:
            input_streams.append(_block_tasks(index, file, task_bytes, of_each, done))
            left += (file.bytes - sum(done[name].disk_bytes for name in finished)) // of_each.num_parts
    return input_streams, left


def expected(
    files: Sequence[InputFile], task_bytes: int, txt_document: TxtDocument, done: Mapping[str, ShardResult]
) -> tuple[list[ShardTask], list[str]]:
    """All tasks in corpus order, with ranges in the place of blocks; and the names of those that are not done.

    Blocks are known as far as they were done, and with the first that was not. Raises OSError as `ranges`.
    """
    tasks = list[ShardTask]()
    for item in _cut(files, task_bytes, txt_document):
        if isinstance(item, ShardTask):
            tasks.append(item)
        else:
            index, file = item
            for name in _blocks_done(index, done):
                tasks.append(ShardTask(name, file.source, (Range(file, int(name.split("-")[1])),)))
    return tasks, [task.name for task in tasks if task.name not in done]


def _blocks_done(index: int, done: Mapping[str, ShardResult]) -> list[str]:
    """Names of the consecutive blocks of a file that are done, and of the next one, if one is missing."""
    names = [_name(index, 0)]
    while names[-1] in done and (start := done[names[-1]].next_start):
        names.append(_name(index, start))
    return names


def _block_tasks(
    index: int, file: InputFile, task_bytes: int, part: Part, done: Collection[str]
) -> Iterator[ShardTask]:
    for number, block in enumerate(blocks(file, min(task_bytes, MAX_BLOCK_BYTES))):
        name = _name(index, block.start)
        if number % part.num_parts == part.number and name not in done:
            yield ShardTask(name, file.source, (block,))


def _cut(
    files: Sequence[InputFile], task_bytes: int, txt_document: TxtDocument
) -> Iterator[ShardTask | tuple[int, InputFile]]:
    """Group consecutive ranges of one source into tasks; yield each file whose blocks are tasks, with its number."""
    packed_bytes = sum(file.bytes for file in files if has_unknown_size(file, txt_document))
    whole_bytes = max(task_bytes // COMPRESSION_FACTOR, min(packed_bytes // MANY_FILES, MAX_WHOLE_BYTES))

    def source_and_kind(numbered: tuple[int, InputFile]) -> tuple[int, bool]:
        file = numbered[1]
        return file.source, has_unknown_size(file, txt_document) and file.bytes > whole_bytes

    for (source, is_cut_later), some in groupby(enumerate(files), source_and_kind):
        if is_cut_later:
            yield from some
            continue
        parts = ((index, part) for index, file in some for part in ranges([file], task_bytes, txt_document))
        for group in gathered(parts, lambda numbered: numbered[1].disk_bytes, task_bytes):
            index, first = group[0]
            yield ShardTask(_name(index, first.start), source, tuple(part for _, part in group))


def _name(file_index: int, start: int) -> str:
    return f"{file_index:07d}-{start:015d}"
