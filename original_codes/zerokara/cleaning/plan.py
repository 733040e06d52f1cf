"""What all stages work by, and the arrays and counts that they leave for one another in the work folder."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from zerokara.base.durable import PARTIAL_SUFFIX, atomic_file
from zerokara.base.errors import Fault, UserError
from zerokara.base.progress import log
from zerokara.config.clean_config import CleanConfig
from zerokara.config.loading import kind_of, load
from zerokara.corpus.documents import HARMLESS, BadLine, Document, Reason
from zerokara.corpus.find import CORPUS, Formats, FoundFiles, InputFile, find_files, note_tests
from zerokara.corpus.read import Range, gathered, ranges, read
from zerokara.corpus.token_hashes import NgramIndex, hashes_of, tokens_per_word
from zerokara.examples.formats import read_records

READ, CLEAN, UNREADABLE, LOST = "read", "text", "unreadable", "lost bytes"
EXACT, NEAR, LINES = "exact_duplicates", "near_duplicates", "repeated_lines"
_FORMAT = 6
"""Raised when the same plan would give other results."""
_TASK_BYTES, _LEAST_TASKS, _MOST_TASKS = 64_000_000, 16, 4000
_EVALUATION = Formats({**CORPUS.of_suffix, ".tsv": "tsv"}, f"{CORPUS.text}; .tsv")


@dataclass(frozen=True)
class Plan:
    """The settings, the files of the corpus and of the evaluation data, and what follows from them; sent to all
    processes."""

    config: CleanConfig
    files: FoundFiles
    evaluation_files: list[InputFile]

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of all that something can be dropped for."""
        of_documents = "encoding_damage", "evaluation_overlap", "languages", *self.config.filters
        return UNREADABLE, *of_documents, EXACT, NEAR, LINES

    @cached_property
    def tasks(self) -> list[list[Range]]:
        """The corpus, divided for the tasks; small files together."""
        total = sum(file.bytes for file in self.files)
        target = max(min(_TASK_BYTES, total // _LEAST_TASKS), total // _MOST_TASKS, 1_000_000)
        return [*gathered(ranges(self.files, target, self.config.txt_document), attrgetter("disk_bytes"), target)]

    def read(self, rank: int) -> Iterator[tuple[int, int, Document | BadLine]]:
        """What is in the text of a task, each with the number of its range, and its line there; the lines of packed
        files, and the rows of a .parquet, are counted in the file."""
        for number, part in enumerate(self.tasks[rank]):
            for item in read(part, self.config.text_field, self.config.txt_document):
                yield number, item.offset + 1 if part.file.format == "parquet" else item.line, item

    @cached_property
    def evaluation(self) -> NgramIndex:
        """The n-grams that must not be in the corpus, each with the index of its file; read once, before the tasks.

        Raises:
            UserError: a file is damaged, or too many of its lines cannot be read.
        """
        found = _texts(self.evaluation_files, self.config.max_bad_fraction)
        texts = ((number, hashes_of(text), tokens_per_word(text)) for number, text in found)
        return NgramIndex(texts, self.config.evaluation_overlap)

    @property
    def outputs(self) -> list[Path]:
        """The files that a finished cleaning can have: the clean text of each task, and what each rule dropped; and
        those in their folders, since step 1 would read the text of an earlier cleaning with that of this one."""
        folder = Path(self.config.output_dir)
        own = {folder / "text" / f"{rank:05d}.jsonl.zst" for rank in range(len(self.tasks))}
        own |= {folder / "dropped" / f"{rule}.jsonl.zst" for rule in self.rules}
        return sorted(own.union(*(folder.glob(f"{name}/*.jsonl.zst") for name in ("text", "dropped"))))

    @property
    def settings(self) -> dict[str, Any]:
        """What the results depend on, but for the files."""
        apart = {"input", "output_dir", "report_only", "evaluation_data", "max_bad_fraction"}
        return self.config.model_dump(exclude={*apart, "executor", "executor_options", "num_workers"})

    @property
    def work_folder(self) -> Path:
        """The folder for what the stages leave, named by all that this depends on."""
        files = [[file.name, file.bytes, file.version] for file in (*self.files, *self.evaluation_files)]
        content = orjson.dumps([_FORMAT, self.settings, files, len(self.files)])
        return Path(self.config.output_dir, f"work{PARTIAL_SUFFIX}", sha256(content).hexdigest()[:16])


def make_plan(config: CleanConfig) -> Plan:
    """Find the files of the corpus, and those of evaluation_data.

    Raises UserError if there are none, or evaluation data is in the corpus.
    """
    own = [Path(config.output_dir, name) for name in ("text", "dropped")]
    files = find_files(config.input, config.where("input"), outputs=own)
    note_tests(files)
    inside = {*map(os.path.realpath, own)}
    if mixed := [file.name for file in files if os.path.dirname(os.path.realpath(file.name)) in inside]:
        rule = f"names {mixed[0]}, which lies where this step writes: the clean text would lie beside the raw"
        raise UserError(config.fault("input", rule, "move it, or choose another output_dir"))
    where = config.where("evaluation_data")
    found: dict[str, InputFile] = {}
    for entry in config.evaluation_data if config.evaluation_overlap else ():
        if not entry.endswith(".yaml"):
            found |= {file.name: file for file in find_files([entry], where, _EVALUATION)}
        elif Path(entry).exists() or entry not in CleanConfig().evaluation_data:
            other = load(kind_of(entry), entry).model_dump()
            holders = [other, *other.get("tasks", ())]
            keys = ("texts", "valid_data", "test_data", "valid_jsonl")
            for name in (name for holder in holders for key in keys for name in holder.get(key, ())):
                try:
                    found |= {file.name: file for file in find_files([name], where, _EVALUATION)}
                except UserError as error:
                    log(f"note: {entry} names {name}, which cannot be looked for: {error.faults[0].rule}")
    corpus = {os.path.realpath(file.name) for file in files}
    if both := [name for name in found if os.path.realpath(name) in corpus]:
        rule = f"names {min(both)}, which is in the corpus: all of it would be dropped"
        raise UserError(Fault(where, rule, remedy="leave it out of one of the two"))
    return Plan(config, files, [*found.values()])


def _texts(files: list[InputFile], max_bad_fraction: float) -> Iterator[tuple[int, str]]:
    """All texts of files, each with the index of its file."""
    for number, file in enumerate(files):
        bad, num_rows = Counter[str](), 0
        rows = read(Range(file), txt_document="line") if file.format == "txt" else read_records(file)
        if file.format == "txt":  # a copy may have its line ends elsewhere
            yield from ((number, row.text) for row in read(Range(file)) if isinstance(row, Document))
        for row in rows:
            num_rows += 1
            if isinstance(row, Document):
                yield from ((number, cell) for cell in row.text.split("\t"))  # such a file may be a table
            elif isinstance(row, BadLine) or row.reason:
                bad[row.reason] += row.reason not in HARMLESS
            else:
                yield from ((number, text) for text in _strings(row.values))
        if bad[Reason.DAMAGED] or bad.total() > max_bad_fraction * num_rows:
            rule = "is damaged" if bad[Reason.DAMAGED] else f"{bad.total():,} of its {num_rows:,} lines cannot be read"
            raise UserError(Fault(file.name, rule, remedy="repair it, or leave it out (evaluation_data)"))
        if bad.total():
            log(f"warning: {bad.total():,} lines of {file.name} cannot be read, and are not looked for")


def _strings(value: Any) -> Iterator[str]:
    """All texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def save(folder: Path, name: str, rank: int, array: NDArray[Any]) -> None:
    with atomic_file(folder / f"{name}-{rank:05d}.npy") as file:
        np.save(file, array)


def saved(folder: Path, name: str, rank: int) -> NDArray[Any]:
    """An array of a task, of which only what is used is read."""
    array: NDArray[Any] = np.load(folder / f"{name}-{rank:05d}.npy", mmap_mode="r")
    return array


def joined(folder: Path, name: str) -> NDArray[np.uint64]:
    """The rows of all tasks, in order."""
    return np.concatenate([np.load(path) for path in sorted(folder.glob(f"{name}-*.npy"))])


def facts(folder: Path, name: str, num_tasks: int) -> list[Any]:
    """The counts of all tasks, in order."""
    return [orjson.loads((folder / f"{name}-{rank:05d}.json").read_bytes()) for rank in range(num_tasks)]
