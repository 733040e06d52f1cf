"""Entries of `tasks` in the configuration → tasks: examples read as fine-tuning reads them, by the same settings.

A line that holds no example (an empty text, a wrong number of columns) is left out, counted, and said beside the
scores; more than `MAX_BAD` of them, a label without a text and an empty answer are errors. Also the overlap of the
tasks with their training data and with the corpus of the pretraining.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from zerokara.config.evaluate_config import TaskSettings
from zerokara.config.finetune_config import FinetuneConfig
from zerokara.corpus.documents import Document, TxtDocument
from zerokara.corpus.find import InputFile, find_files
from zerokara.corpus.read import parts as corpus_parts
from zerokara.corpus.read import read as read_part
from zerokara.errors import Fault, UserError
from zerokara.evaluation import overlap
from zerokara.evaluation.overlap import Overlap
from zerokara.evaluation.tasks import Task
from zerokara.examples import formats, reading
from zerokara.examples.formats import Example, ExampleFormat, Unlearnable
from zerokara.progress import Progress

MAX_BAD = 0.01
"""Share of a file's lines that may hold no example, as `max_bad_fraction` is for fine-tuning."""
_MAX_SHOWN = 5
_PART_BYTES = 1 << 23
TRAINING, PRETRAINING = "training data", "pretraining data"
"""What overlaps are named."""


class _Read(NamedTuple):
    """The examples of some files."""

    examples: list[Example]
    bad: Counter[str]
    """Lines that hold none, by reason."""


@dataclass(frozen=True)
class TaskFiles:
    """The files of one task, found but not read."""

    number: int
    """Place in `tasks`."""
    test: list[InputFile]
    train: list[InputFile]


def find(config: TaskSettings) -> list[TaskFiles]:
    """Find the files of all tasks.

    Raises:
        UserError: an entry names nothing, or a format that is not known.
    """
    found = []
    for number, task in enumerate(config.tasks):
        test = reading.find_example_files(task.test_data, config.where(f"tasks[{number}].test_data"))
        train = reading.find_example_files(task.train_data, config.where(f"tasks[{number}].train_data"))
        found.append(TaskFiles(number, test, train))
    return found


def read(config: TaskSettings, files: TaskFiles, seed: int) -> Task:
    """Read a task; of its test examples at most `max_task_examples`, drawn at random.

    Raises:
        UserError: a file is damaged, of no known format, or holds what cannot be judged; names file, line and value.
    """
    entry = config.tasks[files.number]
    form = _format(config, files)
    test, train = _examples(files.test, form), _examples(files.train, form)
    chosen = _drawn(test.examples, config.max_task_examples, seed)
    labels = sorted({example.answer for example in (*test.examples, *train.examples)})
    is_labels = form.name == "text_label"
    return Task(
        name=entry.name,
        metric=entry.metric if entry.metric != "auto" else "accuracy" if is_labels else "exact_match",
        sources=[example.input for example in chosen],
        references=[example.answer for example in chosen],
        conversations=[list(example.messages[:-1]) for example in chosen] if form.name == "messages" else [],
        prompt_template=entry.prompt_template,
        labels=tuple(form.label_words.values() or labels) if is_labels else (),
        train=[(example.input, example.answer) for example in train.examples],
        max_new_tokens=None if entry.max_new_tokens == "auto" else entry.max_new_tokens,
        warnings=(*_bad_lines("test", test), *_bad_lines("training", train), *_left_out(test.examples, chosen)),
    )


def overlaps(
    config: TaskSettings, tasks: Sequence[Task], text_field: str = "text", txt_document: TxtDocument = "file"
) -> list[dict[str, Overlap]]:
    """For each task the test examples that occur in its training data, and in the corpus of the pretraining.

    The corpus is read once for all tasks; `text_field` and `txt_document` as for any corpus.

    Raises:
        UserError: `pretraining_data` names nothing, or holds no document.
    """
    found: list[dict[str, Overlap]] = [{} for _ in tasks]
    for each, task in zip(found, tasks, strict=True):
        if task.train:
            sources = [source for source, _ in task.train]
            each[TRAINING] = overlap.find([(source,) for source in task.sources], sources)
    if config.pretraining_data and tasks:
        files = find_files(config.pretraining_data, config.where("pretraining_data"))
        corpus = _Corpus(files, text_field, txt_document)
        whole = overlap.find([texts for task in tasks for texts in task.texts], corpus)
        if not corpus.num_documents:
            rule = f"holds no document with the field {text_field!r}"
            raise UserError(config.fault("pretraining_data", rule, "check text_field"))
        start = 0
        for each, task in zip(found, tasks, strict=True):
            each[PRETRAINING] = whole.part(start, len(task.sources))
            start += len(task.sources)
    return found


@dataclass
class _Corpus:
    """The documents of a corpus, which are counted as they are read; lines that hold none do not matter here."""

    files: Sequence[InputFile]
    text_field: str
    txt_document: TxtDocument
    num_documents: int = 0

    def __iter__(self) -> Iterator[str]:
        total = sum(file.bytes for file in self.files)
        with Progress("comparing with the pretraining data", total, unit="B") as progress:
            for part in corpus_parts(self.files, _PART_BYTES, self.txt_document):
                for item in read_part(part, self.text_field, self.txt_document):
                    if isinstance(item, Document):
                        self.num_documents += 1
                        yield item.text
                progress.advance(part.disk_bytes)


def _format(config: TaskSettings, files: TaskFiles) -> ExampleFormat:
    """How the records of a task become examples, found as fine-tuning finds it."""
    entry, number = config.tasks[files.number], files.number
    settings = FinetuneConfig(
        data_format=entry.data_format,
        input_field=entry.input_field,
        output_field=entry.output_field,
        label_words=entry.label_words,
        prompt_template=entry.prompt_template,
        system_prompt=entry.system_prompt,
        metric="loss" if entry.metric == "auto" else entry.metric,
    )
    try:
        # The template of `auto` depends on the model: `Task.prompts` fills it in.
        return formats.resolve(settings, [*files.test, *files.train], is_encoder_decoder=False)
    except UserError as error:
        raise UserError([_placed(config, number, fault) for fault in error.faults]) from error


def _placed(config: TaskSettings, number: int, fault: Fault) -> Fault:
    """A fault of a setting, at its place in this configuration."""
    if fault.where != FinetuneConfig().where(fault.key or "x"):
        return fault
    key = f"tasks[{number}].{fault.key}"
    return replace(fault, where=config.where(key), key=key)


def _examples(files: Sequence[InputFile], form: ExampleFormat) -> _Read:
    """The examples of all files, in order."""
    found = _Read([], Counter())
    faults: list[Fault] = []
    num_lines = 0
    for record, example in formats.read_examples(form, chain.from_iterable(map(reading.read_records, files))):
        num_lines += 1
        if example is None:
            found.bad[record.reason] += 1
        elif isinstance(example, Unlearnable):
            faults.append(replace(example.fault, where=record.place))
            if len(faults) == _MAX_SHOWN:
                raise UserError(faults) from example
        else:
            found.examples.append(example)
    if faults:
        raise UserError(faults)
    if found.bad.total() > MAX_BAD * num_lines or (files and not found.examples):
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in found.bad.most_common(_MAX_SHOWN))
        rule = f"{found.bad.total():,} of {num_lines:,} lines hold no example: {reasons or 'there are none'}"
        raise UserError(Fault(files[0].name, rule, remedy="mend or remove them"))
    return found


def _drawn(examples: list[Example], most: int | str, seed: int) -> list[Example]:
    """At most so many of the examples, drawn at random, in their order."""
    if not isinstance(most, int) or len(examples) <= most:
        return examples
    chosen = np.random.default_rng(seed).permutation(len(examples))[:most]
    return [examples[number] for number in sorted(chosen.tolist())]


def _bad_lines(what: str, found: _Read) -> Iterator[str]:
    if found.bad:
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in found.bad.most_common(_MAX_SHOWN))
        yield f"{found.bad.total():,} lines of the {what} data hold no example and are left out: {reasons}"


def _left_out(examples: Sequence[Example], chosen: Sequence[Example]) -> Iterator[str]:
    if len(chosen) < len(examples):
        yield f"{len(chosen):,} of {len(examples):,} test examples were drawn (max_task_examples)"
