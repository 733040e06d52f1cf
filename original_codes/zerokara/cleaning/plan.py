"""What all stages work by, and the files that they leave for one another in the work folder.

A document that no rule drops by itself is *kept*, and known by its id: the number of its task, `RANK` bits up, and its
number there. Of equal documents the one with the lowest id stays, whatever the number of workers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from zerokara.config.clean_config import CleanConfig
from zerokara.config.loading import FILES, load
from zerokara.corpus.compressed import zstd_module
from zerokara.corpus.documents import Document
from zerokara.corpus.find import CORPUS, Formats, InputFile, find_files
from zerokara.corpus.read import Range, ranges, read
from zerokara.corpus.token_hashes import NgramIndex
from zerokara.durable import PARTIAL_SUFFIX, atomic_file, write_json
from zerokara.errors import Fault, UserError
from zerokara.examples.formats import read_records
from zerokara.progress import log

RANK = 32
KEPT, CLEAN, DROPPED, UNREADABLE = "kept", "clean", "dropped-", "unreadable"
EXACT, NEAR, LINES = "exact_duplicates", "near_duplicates", "repeated_lines"
_FORMAT = 1
"""Raised when the same plan would give other results."""
_TASK_BYTES, _LEAST_TASKS, _MOST_TASKS = 64_000_000, 16, 4000
_EVALUATION = Formats({**CORPUS.of_suffix, ".tsv": "tsv"}, f"{CORPUS.text}; .tsv")


@dataclass(frozen=True)
class Plan:
    """The settings and the files of the corpus, and what follows from them; sent to all processes."""

    config: CleanConfig
    files: list[InputFile]

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of all that something can be dropped for."""
        return UNREADABLE, *self.config.document_rules, EXACT, NEAR, LINES

    @cached_property
    def tasks(self) -> list[list[Range]]:
        """The corpus, divided for the tasks; small files together."""
        total, left = sum(file.bytes for file in self.files), -1
        target = max(min(_TASK_BYTES, total // _LEAST_TASKS), total // _MOST_TASKS, 1_000_000)
        tasks: list[list[Range]] = []
        for part in ranges(self.files, target, self.config.txt_document):
            if part.disk_bytes > left or not tasks:
                tasks.append([])
                left = target
            tasks[-1].append(part)
            left -= part.disk_bytes
        return tasks

    @cached_property
    def evaluation(self) -> tuple[list[str], NgramIndex]:
        """The n-grams that must not be in the corpus, and the file of each text that they are from.

        Raises:
            UserError: evaluation_data names what cannot be read, or the corpus itself.
        """
        own = {file.name for file in self.files}
        named = [*_evaluation_texts(self.config, own)] if self.config.evaluation_overlap else []
        return [name for name, _ in named], NgramIndex([(text,) for _, text in named], self.config.evaluation_overlap)

    @property
    def outputs(self) -> list[Path]:
        """The files that a finished cleaning can have: the clean text of each task, and what each rule dropped."""
        folder = Path(self.config.output_dir)
        text = [folder / "text" / f"{rank:05d}.jsonl.zst" for rank in range(len(self.tasks))]
        return [*text, *(folder / "dropped" / f"{rule}.jsonl.zst" for rule in self.rules)]

    @property
    def evaluation_content(self) -> list[str]:
        """The n-grams of the evaluation data, by their SHA-256."""
        return [sha256(hashes.tobytes()).hexdigest() for _, (hashes, _) in sorted(self.evaluation[1].by_size.items())]

    @property
    def work_folder(self) -> Path:
        """The folder for what the stages leave, named by all that this depends on."""
        apart = {"report_only", "output_dir", "executor", "executor_options", "num_workers"}
        versions = [[file.name, file.bytes, file.modified_ns] for file in self.files]
        content = orjson.dumps([_FORMAT, self.config.model_dump(exclude=apart), versions, self.evaluation_content])
        return Path(self.config.output_dir, f"work{PARTIAL_SUFFIX}", sha256(content).hexdigest()[:16])


def _evaluation_texts(config: CleanConfig, corpus: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the texts of evaluation_data, each with the name of its file."""
    where = config.where("evaluation_data")
    for entry in config.evaluation_data:
        named = [entry]
        if is_configuration := entry.endswith(".yaml"):
            if entry in CleanConfig().evaluation_data and not Path(entry).exists():
                continue
            other = load(next((FILES[name] for name in FILES if entry.endswith(name)), CleanConfig), entry).model_dump()
            tasks = [name for task in other.get("tasks", ()) for name in task["test_data"]]
            named = [*other.get("texts", ()), *other.get("valid_data", ()), *other.get("test_data", ()), *tasks]
        for name in named:
            try:
                files = find_files([name], where, _EVALUATION)
            except UserError as error:
                if not is_configuration:
                    raise
                log(f"note: {entry} names {name}, which cannot be looked for: {error.faults[0].rule}")
                continue
            for file in files:
                if file.name in corpus:
                    rule = f"names {file.name}, which is in the corpus: all of it would be dropped"
                    raise UserError(Fault(where, rule, remedy="leave it out of one of the two"))
                if file.format == "txt":
                    lines = read(Range(file), txt_document="line")
                    yield from ((file.name, line.text) for line in lines if isinstance(line, Document))
                else:
                    found = (text for record in read_records(file) for text in _strings(record.values))
                    yield from ((file.name, text) for text in found)


def _strings(value: Any) -> Iterator[str]:
    """All texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(each)


def save(folder: Path, name: str, rank: int, array: NDArray[Any]) -> None:
    """Write an array of a task."""
    with atomic_file(folder / f"{name}-{rank:05d}.npy") as file:
        np.save(file, array)


def saved(folder: Path, name: str, rank: int) -> NDArray[Any]:
    """An array of a task, of which only what is used is read."""
    array: NDArray[Any] = np.load(folder / f"{name}-{rank:05d}.npy", mmap_mode="r")
    return array


class Shards(ExitStack):
    """What a task writes: a file of JSON lines for each name, and the documents and bytes in it by source; packed at a
    level of zstd, 1 for what only the next stage reads."""

    def __init__(self, folder: Path, rank: int, level: int):
        super().__init__()
        self._folder, self._rank, self._level, self._files = folder, rank, level, dict[str, IO[bytes]]()
        self.tallies: dict[str, Counter[str]] = defaultdict(Counter)

    def put(self, name: str, text: str, source: str, line: int, **more: Any) -> None:
        """Write a text, or a part of one, with the file and the line in which it was found."""
        if name not in self._files:
            file = self.enter_context(atomic_file(shard(self._folder, name, self._rank)))
            self._files[name] = self.enter_context(zstd_module().open(file, "wb", level=self._level))
        record = {"text": text, "source": source, "line": line, **more}
        self._files[name].write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        self.tallies[name].update({f"{source}\tdocuments": 1, f"{source}\tbytes": len(text.encode())})


def shard(folder: Path, name: str, rank: int) -> Path:
    """The file of that name of a task, which exists if anything was written."""
    return folder / f"{name}-{rank:05d}.jsonl.zst"


def records(folder: Path, name: str, rank: int) -> Iterator[dict[str, Any]]:
    """Read what a task wrote."""
    if (path := shard(folder, name, rank)).exists():
        with zstd_module().open(path) as lines:
            yield from map(orjson.loads, lines)


def save_facts(folder: Path, name: str, rank: int, facts: Any) -> None:
    """Write counts of a task."""
    write_json(folder / f"{name}-{rank:05d}.json", facts)


def saved_facts(folder: Path, name: str, num_tasks: int) -> list[Any]:
    """The counts of all tasks, in order."""
    return [orjson.loads((folder / f"{name}-{rank:05d}.json").read_bytes()) for rank in range(num_tasks)]
