"""Inputs of step 8: Hugging Face folders as far as names tell, texts for bits per byte, and the data of tasks.

In: `models`, `texts` and `tasks` of the configuration. Out: faults of folders; a `MeasuredText` for each entry of
`texts`, its documents drawn at random where the entry is larger than what may be measured; a `TaskData` for each entry
of `tasks`, its examples read as fine-tuning reads them, by the same settings; and the overlap of the tasks with their
training data and with the corpus of the pretraining. No torch here: a wrong name is refused at once.

A line that holds no example (an empty text, a wrong number of columns) is left out, counted, and reported beside the
scores; more than `MAX_BAD` of them, a label without a text and an empty answer are errors.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from itertools import chain, groupby
from pathlib import Path

import numpy as np
import orjson

from zerokara.base.errors import Fault, UserError, refuse
from zerokara.base.progress import log
from zerokara.config.evaluate_config import EvaluateConfig, TaskSettings, TextSettings
from zerokara.config.finetune_config import FinetuneConfig
from zerokara.corpus.documents import HARMLESS, BadLine, Document
from zerokara.corpus.find import TABLES, InputFile, find_files
from zerokara.corpus.read import read_files
from zerokara.corpus.token_hashes import is_short
from zerokara.evaluation import overlap
from zerokara.evaluation.baselines import Pair
from zerokara.evaluation.overlap import Overlap
from zerokara.examples import formats
from zerokara.examples.facts import PLACE_OF_INPUT, FinetuneFacts
from zerokara.examples.formats import Example, ExampleFormat, Unlearnable
from zerokara.huggingface import model_folder
from zerokara.tokenizer.sampling import Reservoir

_CONTENT = (".safetensors", ".json", ".model", ".txt", ".jinja")
"""Files that make a model what it is: weights, configuration, tokenizer (vocab.txt, merges.txt)."""
_RECORDS = ("manifest.json", "trainer_state.json")
Prompt = str | Sequence[formats.Message]
"""A text, or a conversation that ends with the user: ``role`` and ``content`` of each turn."""
MAX_BAD = 0.01
"""Maximum share of a file's lines that hold no example, as `max_bad_fraction` is for fine-tuning."""
_MAX_SHOWN = 5
TRAINING, PRETRAINING = "training data", "pretraining data"
"""Names of overlaps."""


def check_folder(folder: Path) -> Fault | None:
    """Return what keeps a folder from being a model, as far as names and headers tell."""
    try:
        model_folder.tensors(folder, partial(Fault, str(folder)))
    except UserError as error:
        return error.faults[0]
    return None


def model_files(folder: Path) -> list[Path]:
    """Files of a folder that make the model what it is, by name."""
    files = [path for path in folder.iterdir() if path.is_file() and path.suffix in _CONTENT]
    return sorted(path for path in files if path.name not in _RECORDS)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Last parts of each path, as many as distinguish all of them."""
    all_parts = [path.absolute().parts for path in paths]
    for count in range(1, max(map(len, all_parts), default=0) + 1):
        names = ["/".join(each[-count:]) for each in all_parts]
        if len(set(names)) == len(names):
            return names
    return list(map(str, paths))


@dataclass(frozen=True)
class MeasuredText:
    """Documents of one entry of `texts`, in their order."""

    name: str
    """File or folder name of the entry, with as much of its path as distinguishes it from the others."""
    documents: tuple[str, ...]
    num_found: int
    """Number of documents of the entry, of which these were drawn."""
    bad_lines: dict[str, int] = field(default_factory=dict)
    """Number of lines that were no documents, by reason."""

    @cached_property
    def bytes(self) -> list[int]:
        """UTF-8 bytes of each document's text, without any end."""
        return [len(document.encode()) for document in self.documents]

    @cached_property
    def content(self) -> str:
        """SHA-256 over the documents, as a list in JSON."""
        return sha256(orjson.dumps(self.documents)).hexdigest()


def read_texts(config: TextSettings, files: Sequence[InputFile], seed: int) -> Iterator[MeasuredText]:
    """Read the entries of `texts`, one after the other, from all of their files.

    Raises:
        UserError: an entry holds no document.
    """
    names = short_names([Path(entry) for entry in config.texts])
    for source, members in groupby(files, key=lambda file: file.source):
        items = read_files(list(members), f"reading {names[source]}", config.text_field, config.txt_document)
        text = _draw(names[source], items, config.max_text_bytes, seed)
        if not text.documents:
            reasons = ", ".join(f"{reason} ({count:,})" for reason, count in text.bad_lines.items()) or "it is empty"
            raise UserError(config.fault(f"texts[{source}]", f"holds no document: {reasons}", "check text_field"))
        if (size := sum(text.bytes)) > config.max_text_bytes:
            log(f"warning: {text.name}: one document of {size:,} bytes is measured, more than max_text_bytes")
        yield text


def _draw(name: str, items: Iterator[Document | BadLine], max_bytes: int, seed: int) -> MeasuredText:
    """Keep at most `max_bytes` of the documents (at least one document), drawn at random."""
    keys, drawn, num_found, bad = random.Random(seed), Reservoir(max_bytes, least=1), 0, Counter[str]()
    for item in items:
        if isinstance(item, Document):
            num_found += 1
            drawn.offer(keys.random(), num_found, item.text.encode())
        elif item.reason not in HARMLESS:
            bad[str(item.reason)] += item.documents
    documents = tuple(text.decode() for _, text in drawn.drain())
    return MeasuredText(name, documents, num_found, dict(bad))


@dataclass(frozen=True)
class TaskData:
    """Test data, with its prompts and its metric."""

    name: str
    metric: str
    """A key of `METRICS`."""
    sources: list[str]
    """Input texts, without the prompt around them; of a conversation its last message before the answer."""
    references: list[str]
    conversations: list[list[formats.Message]] = field(default_factory=list)
    """All messages before each answer, in a task of conversations; else empty."""
    prompt_template: str = "auto"
    """Text around a source, with ``{input}`` in its place; `auto` as in fine-tuning."""
    labels: tuple[str, ...] = ()
    """Text of every label; empty where references are free text."""
    train: list[Pair] = field(default_factory=list)
    """Sources and targets of the training data, from which baselines learn."""
    max_new_tokens: int | None = None
    """Maximum tokens of an answer; None for as many as the right answers suggest."""
    warnings: tuple[str, ...] = ()
    """Parts of the data that were left out."""

    def prompts(self, is_encoder_decoder: bool, tuned: FinetuneFacts | None = None) -> list[Prompt]:
        """Prompts for a model; `auto` is as it was fine-tuned, if that is known."""
        if self.conversations:
            return [formats.with_system(turns, tuned.system_prompt if tuned else "") for turns in self.conversations]
        template = self.prompt_template
        if template == "auto":
            template = (tuned and tuned.prompt_template) or formats.auto_template(is_encoder_decoder)
        return [template.replace(PLACE_OF_INPUT, source) for source in self.sources]

    @property
    def texts(self) -> list[tuple[str, ...]]:
        """Texts of each example to look for in a corpus; labels and short answers are in any text."""
        return [
            (source,) if self.labels or is_short(reference) else (source, reference)
            for source, reference in zip(self.sources, self.references, strict=True)
        ]


TaskFiles = tuple[list[InputFile], list[InputFile]]
"""Test files and training files of a task, found but not read."""


def find_task_files(config: TaskSettings) -> list[TaskFiles]:
    """Find the files of all tasks. Raises UserError if an entry names nothing, or a format that is not known."""
    found = list[TaskFiles]()
    for number, task in enumerate(config.tasks):
        test = find_files(task.test_data, config.where(f"tasks[{number}].test_data"), TABLES)
        place = config.where(f"tasks[{number}].train_data")
        train = find_files(task.train_data, place, TABLES) if task.train_data else []
        found.append((test, train))
    return found


def read_task(config: TaskSettings, number: int, files: TaskFiles, seed: int) -> TaskData:
    """Read the task `number`; of its test examples at most `max_task_examples`, drawn at random.

    Raises:
        UserError: a file is damaged, of no known format, or holds what cannot be judged; names file, line and value.
    """
    entry, warnings = config.tasks[number], []
    form = _format(config, number, files)
    (test, bad_test), (train, bad_train) = (_examples(each, form) for each in files)
    for name, bad in (("test", bad_test), ("training", bad_train)):
        if bad:
            rule = f"{bad.total():,} lines of the {name} data hold no example and are left out"
            warnings.append(f"{rule}: {_reasons(bad)}")
    chosen, most = test, config.max_task_examples
    if isinstance(most, int) and most < len(test):
        numbers = np.random.default_rng(seed).permutation(len(test))[:most]
        chosen = [test[number] for number in sorted(numbers.tolist())]
        warnings.append(f"{most:,} of {len(test):,} test examples were drawn (max_task_examples)")
    is_labels = form.name == "text_label"
    labels = form.label_words.values() or sorted({example.answer for example in (*test, *train)})
    return TaskData(
        name=entry.name,
        metric=entry.metric if entry.metric != "auto" else "accuracy" if is_labels else "exact_match",
        sources=[example.input for example in chosen],
        references=[example.answer for example in chosen],
        conversations=[list(example.messages[:-1]) for example in chosen] if form.name == "messages" else [],
        prompt_template=entry.prompt_template,
        labels=tuple(labels) if is_labels else (),
        train=[(example.input, example.answer) for example in train],
        max_new_tokens=None if entry.max_new_tokens == "auto" else entry.max_new_tokens,
        warnings=tuple(warnings),
    )


def _format(config: TaskSettings, number: int, files: TaskFiles) -> ExampleFormat:
    """Format of the examples of a task, found as fine-tuning finds it."""
    entry = config.tasks[number]
    names = {"data_format", "input_field", "output_field", "label_words", "prompt_template", "system_prompt"}
    metric = "loss" if entry.metric == "auto" else entry.metric
    settings = FinetuneConfig(**entry.model_dump(include=names), metric=metric)
    try:
        # The template of `auto` depends on the model: `TaskData.prompts` fills it in.
        return formats.resolve(settings, [*chain.from_iterable(files)], is_encoder_decoder=False)
    except UserError as error:
        faults = []
        for fault in error.faults:
            if fault.where == str(settings.path):  # a setting: its place is in this configuration
                key = f"tasks[{number}].{fault.key}"
                fault = replace(fault, where=config.where(key), key=key)
            faults.append(fault)
        raise UserError(faults) from error


def _examples(files: Sequence[InputFile], form: ExampleFormat) -> tuple[list[Example], Counter[str]]:
    """Examples of all files, in order, and the number of lines that hold none, by reason."""
    examples, bad, faults = list[Example](), Counter[str](), list[Fault]()
    for record, example in formats.read_examples(form, chain.from_iterable(map(formats.read_records, files))):
        if example is None:
            bad[record.reason] += 1
        elif isinstance(example, Unlearnable):
            faults.append(replace(example.fault, where=record.place))
            if len(faults) == _MAX_SHOWN:
                break
        elif more := list(chain.from_iterable(map(formats.extra_keys, example.messages))):
            bad[f"a message has the field {more[0]!r}, which only a training reads"] += 1
        else:
            examples.append(example)
    refuse(faults)
    num_lines = len(examples) + bad.total()
    if bad.total() > MAX_BAD * num_lines or (files and not examples):
        rule = f"{bad.total():,} of {num_lines:,} lines hold no example: {_reasons(bad) or 'there are none'}"
        raise UserError(Fault(files[0].name, rule, remedy="mend or remove them"))
    return examples, bad


def _reasons(bad: Counter[str]) -> str:
    return ", ".join(f"{reason} ({count:,})" for reason, count in bad.most_common(_MAX_SHOWN))


def overlaps(config: EvaluateConfig, tasks: Sequence[TaskData]) -> list[dict[str, Overlap]]:
    """Test examples of each task that occur in its training data, and in the corpus of the pretraining.

    The corpus is read once for all tasks; lines that hold no document do not matter here.

    Raises:
        UserError: `pretraining_data` names nothing, or holds no document.
    """
    found: list[dict[str, Overlap]] = [{} for _ in tasks]
    for each, task in zip(found, tasks, strict=True):
        if task.train:
            sources = [source for source, _ in task.train]
            (each[TRAINING],) = overlap.find([[(source,) for source in task.sources]], sources)
    if config.pretraining_data and tasks:
        files = find_files(config.pretraining_data, config.where("pretraining_data"))
        items = read_files(files, "comparing with the pretraining data", config.text_field, config.txt_document)
        documents = (item.text for item in items if isinstance(item, Document))
        if (first := next(documents, None)) is None:
            rule = f"holds no document with the field {config.text_field!r}"
            raise UserError(config.fault("pretraining_data", rule, "check text_field"))
        of_tasks = overlap.find([task.texts for task in tasks], chain([first], documents))
        for each, of_task in zip(found, of_tasks, strict=True):
            each[PRETRAINING] = of_task
    return found
