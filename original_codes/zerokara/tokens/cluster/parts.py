"""The tasks that are left, dealt into parts of about the same work, each for one machine.

A packed file that holds much of the corpus is dealt by its blocks: of K parts the first gets blocks 0, K, 2K, …, the
second 1, K + 1, …. Each unpacks the whole file to reach its own, which pays as long as unpacking is faster than all of
them encode together.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerokara.corpus.documents import TxtDocument
from zerokara.corpus.find import InputFile
from zerokara.corpus.read import Range
from zerokara.durable import write_bytes
from zerokara.errors import Fault, UserError
from zerokara.manifest import RemoteFile
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.fast_encoder import FastEncoder
from zerokara.tokens.tasks import Stream, Task

MAX_STREAM_PARTS = 8
"""Parts of one packed file at most: gzip unpacks some 0.4 GB/s, which eight machines of eight cores encode."""
_UNPACKED = 4
"""Bytes of text that a byte of a packed file usually holds."""
_STREAM_NUMBERS = ("index", "block_bytes", "first", "step", "end")
GB_A_PART = 8
MIN_PARTS, MAX_PARTS = 4, 500
"""Of `auto`; Slurm's arrays have at most 1001 tasks where nobody has changed MaxArraySize."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a part, which lies at the same place on every machine."""

    path: str
    sha256: str
    is_fast: bool
    """Whether the fast encoder does the work."""

    @classmethod
    def of(cls, encoder: Encoder | FastEncoder) -> Tokenizer:
        """That of an encoder."""
        return cls(str(encoder.model_path), encoder.sha256, isinstance(encoder, FastEncoder))

    def open(self) -> Encoder | FastEncoder:
        """Open it on this machine.

        Raises:
            UserError: it is another one here, or none.
        """
        encoder = FastEncoder(Path(self.path)) if self.is_fast else Encoder(self.path)
        if encoder.sha256 != self.sha256:
            rule = "is another tokenizer here than where the step was started"
            raise UserError(Fault(where=self.path, rule=rule, remedy="copy it here again"))
        return encoder


@dataclass(frozen=True)
class Part:
    """What one process on one machine does."""

    number: int
    tokenizer: Tokenizer
    text_field: str
    txt_document: TxtDocument
    num_workers: int | None
    """Worker processes; None for one a core of the machine that it runs on."""
    tasks: Sequence[Task | Stream]

    def write(self, folder: Path) -> None:
        """Leave it in the work folder, where `read` finds it."""
        files = [one.file for one in self._ranges_and_streams()]
        index = {file: number for number, file in enumerate(dict.fromkeys(files))}
        content = {
            "tokenizer": asdict(self.tokenizer),
            "text_field": self.text_field,
            "txt_document": self.txt_document,
            "num_workers": self.num_workers,
            "files": [{**asdict(file), "path": str(file.path)} for file in index],
            "tasks": [
                {
                    "name": task.name,
                    "source": task.source,
                    "ranges": [(index[one.file], one.start, one.end, one.row_group_bytes) for one in task.ranges],
                }
                for task in self.tasks
                if isinstance(task, Task)
            ],
            "streams": [
                {
                    "file": index[stream.file],
                    **{name: getattr(stream, name) for name in _STREAM_NUMBERS},
                    "done": list(stream.blocks),
                }
                for stream in self.tasks
                if isinstance(stream, Stream)
            ],
        }
        # Python's own, which keeps the bytes of a file's name that are no UTF-8.
        write_bytes(part_path(folder, self.number, "part"), json.dumps(content).encode())

    @classmethod
    def read(cls, folder: Path, number: int) -> Part:
        """Read it, on any machine.

        Raises:
            ValueError, TypeError, KeyError: it is damaged.
        """
        content = json.loads(part_path(folder, number, "part").read_bytes())
        files = [_file(**values) for values in content.pop("files")]
        tasks: list[Task | Stream] = []
        for task in content.pop("tasks"):
            ranges = tuple(Range(files[file], *numbers) for file, *numbers in task["ranges"])
            tasks.append(Task(task["name"], task["source"], ranges))
        for stream in content.pop("streams"):
            made = Stream(file=files[stream.pop("file")], **{name: stream[name] for name in _STREAM_NUMBERS})
            for start in stream["done"]:
                made.block(start)
            tasks.append(made)
        return cls(number=number, tokenizer=Tokenizer(**content.pop("tokenizer")), tasks=tasks, **content)

    @property
    def files(self) -> list[InputFile]:
        """The corpus files that it reads, each once."""
        return list({one.file.path: one.file for one in self._ranges_and_streams()}.values())

    def _ranges_and_streams(self) -> Iterator[Range | Stream]:
        for one in self.tasks:
            if isinstance(one, Stream):
                yield one
            else:
                yield from one.ranges


def _file(path: str, remote: dict[str, Any] | None, **values: Any) -> InputFile:
    return InputFile(path=Path(path), remote=RemoteFile(**remote) if remote else None, **values)


def part_path(folder: Path, number: int, ending: str) -> Path:
    """A file of a part: ``part`` itself, ``error``, ``hashes``, ``log``."""
    return folder / f"part-{number:05d}.{ending}"


def numbers_in(folder: Path) -> list[int]:
    """The parts that lie in a work folder."""
    return sorted(int(path.stem.removeprefix("part-")) for path in folder.glob("part-*.part"))


def usual_number(text_bytes: int) -> int:
    """How many parts `auto` means for so much text."""
    return max(MIN_PARTS, min(MAX_PARTS, text_bytes // (GB_A_PART * 10**9)))


def deal(left: Sequence[Task | Stream], number: int) -> list[list[Task | Stream]]:
    """Deal tasks and streams into `number` parts or fewer, none of them empty."""
    dealt: list[list[Task | Stream]] = [[] for _ in range(number)]
    total = sum(_weight(one) for one in left)
    loads = [0.0] * number
    streams = sorted((one for one in left if isinstance(one, Stream)), key=_weight, reverse=True)
    for stream in streams:
        wanted = math.ceil(number * _weight(stream) / max(1, total))
        pieces = stream.every(min(wanted, number, MAX_STREAM_PARTS))
        least = heapq.nsmallest(len(pieces), range(number), key=loads.__getitem__)
        for piece, of_part in zip(pieces, least, strict=True):
            dealt[of_part].append(piece)
            loads[of_part] += _weight(stream) / len(pieces)
    heap = [(load, of_part) for of_part, load in enumerate(loads)]
    heapq.heapify(heap)
    for task in (one for one in left if isinstance(one, Task)):
        load, of_part = heapq.heappop(heap)
        dealt[of_part].append(task)
        heapq.heappush(heap, (load + _weight(task), of_part))
    return [tasks for tasks in dealt if tasks]


def _weight(one: Task | Stream) -> int:
    """Its text, roughly, in bytes."""
    if isinstance(one, Stream):
        return one.file.bytes * _UNPACKED
    return sum(range_.disk_bytes * (_UNPACKED if range_.file.is_packed else 1) for range_ in one.ranges)
