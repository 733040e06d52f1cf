"""A task → each model's score on its test data, with intervals, beside baselines, and without overlapping examples.

In: a `Task` (sources, references, a metric, the pairs that models were fine-tuned on) and the models. Out: sections of
the results: for each *system*, a model or a baseline, the metric with its 95 % interval over all test examples, and
over those that do not occur in the training data, or in the pretraining corpus; and the paired differences between
models, and of models to baselines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokara.evaluation import baselines, metrics, overlap
from zerokara.evaluation.answers import Answers, Prompt, answers_of
from zerokara.evaluation.baselines import Pair
from zerokara.evaluation.measures import Measure, percent
from zerokara.evaluation.overlap import Overlap
from zerokara.evaluation.results import Baseline, PairedDifference, Row, Section
from zerokara.progress import log, plural

if TYPE_CHECKING:
    from zerokara.evaluation.models import LoadedModel

INPUT = "{input}"
_MAX_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class Task:
    """Test data, and how it is asked and judged."""

    name: str
    metric: str
    """A key of `METRICS`."""
    sources: list[str]
    """What is read, without the prompt around it; of a conversation its last message before the answer."""
    references: list[str]
    """The expected answers."""
    conversations: list[Prompt] = field(default_factory=list)
    """Of a task of conversations: all messages before each answer; else empty."""
    prompt_template: str = "auto"
    """Text around a source, with ``{input}`` in its place; `auto` as in fine-tuning."""
    labels: tuple[str, ...] = ()
    """The text of every label; empty where references are free text."""
    train: list[Pair] = field(default_factory=list)
    """Sources and targets of the training data, from which baselines learn."""
    max_new_tokens: int | None = None
    """Most tokens of an answer; None for as many as the right answers suggest."""
    warnings: tuple[str, ...] = ()
    """What was left out of the data."""

    def prompts(self, is_encoder_decoder: bool) -> list[Prompt]:
        """What a model is given; `auto` puts a source for a decoder on a line of its own."""
        if self.conversations:
            return self.conversations
        template = self.prompt_template
        if template == "auto":
            template = INPUT if is_encoder_decoder else f"{INPUT}\n"
        return [template.replace(INPUT, source) for source in self.sources]

    @property
    def texts(self) -> list[tuple[str, ...]]:
        """The texts of each example to look for in a corpus; labels and short answers are in any text."""
        pairs = zip(self.sources, self.references, strict=True)
        return [
            (source,) if self.labels or len(overlap.tokens(reference)) < overlap.MIN_TOKENS else (source, reference)
            for source, reference in pairs
        ]


@dataclass(frozen=True)
class System:
    """A model or a baseline on test examples of a task."""

    name: str
    measure: Measure
    is_baseline: bool = False
    notes: tuple[str, ...] = ()
    """What a reader must know beside the value of a model."""
    details: dict[str, Any] = field(default_factory=dict)


def measure_tasks(
    read: Iterable[tuple[Task, dict[str, Overlap]]], models: Sequence[LoadedModel], *, seed: int, cache: Path | None
) -> Iterator[Section]:
    """Every section of every task, which comes with what overlaps; `cache` is a folder for answers.

    Raises:
        RunError: a model cannot be asked: it has no end token, or no chat template for conversations.
    """
    found = [(task, overlaps, dict[str, Answers]()) for task, overlaps in read]
    for model in models:  # each answers all tasks before the next one is loaded
        for task, _, answers in found:
            prompts, expected = task.prompts(model.is_encoder_decoder), [*task.references, *task.labels]
            answers[model.name] = answers_of(model, prompts, expected, task.max_new_tokens, task.name, cache)
    for task, overlaps, answers in found:
        yield from sections(task, answers, overlaps, seed)


def sections(
    task: Task, answers: Mapping[str, Answers], overlaps: Mapping[str, Overlap], seed: int = 0
) -> list[Section]:
    """The results of a task, given each model's answers by its name, and what overlaps by what it is compared with.

    The first section is the metric on all test examples; then comes the same without the examples that overlap.
    """
    metric = metrics.METRICS[task.metric]
    found = [_model(task, name, each) for name, each in answers.items()]
    log(f"{task.name}: computing baselines from {plural(len(task.train), 'training example')}")
    others = (
        baselines.for_labels(task.train, task.sources, task.references, seed)
        if task.labels
        else baselines.for_texts(task.train, task.sources)
    )
    found += [System(each.name, metric(each.outputs, task.references), is_baseline=True) for each in others]
    warnings = list(task.warnings)
    for name, each in overlaps.items():
        if each.found:
            warnings.append(
                f"{len(each.found):,} of {each.num_examples:,} test examples occur in the {name}: {len(each.exact):,} "
                f"exactly, {len(each.by_ngram):,} by an n-gram of {overlap.NGRAM} tokens"
            )
    facts = {
        "examples": len(task.references),
        "training_pairs": len(task.train),
        "max_new_tokens": {name: each.max_new_tokens for name, each in answers.items()},
        "overlap": {
            name: {"exact": len(each.exact), "by_ngram": len(each.by_ngram), "examples": len(each.found)}
            for name, each in overlaps.items()
        },
    }
    title = f"task: {task.name}, {found[0].measure.name.replace('_', ' ')}"
    made = [_section(title, found, seed, tuple(warnings), facts)]
    for name, each in overlaps.items():
        if each.found and each.rest:
            rest = [System(one.name, one.measure.subset(each.rest), one.is_baseline) for one in found]
            made.append(_section(f"{title}, without what occurs in the {name}", rest, seed))
    return made


def _model(task: Task, name: str, answers: Answers) -> System:
    notes: list[str] = []
    stopped, too_long = answers.stopped, answers.num_too_long
    details: dict[str, Any] = {"stopped": 100 * sum(stopped) / len(stopped), "too_long": too_long}
    if too_long:
        notes.append(f"{plural(too_long, 'prompt')} longer than the model's context: not answered")
    if cut := stopped.count(False) - too_long:
        notes.append(f"{cut:,} of {len(stopped):,} answers did not end by themselves")
    if task.labels:
        found = metrics.unmatched(answers.outputs, task.labels)
        shown = [[text[:_MAX_SHOWN_CHARACTERS], count] for text, count in found.most_common]
        details["unmatched"] = {"outputs": len(found.indices), "most_common": shown}
        if shown:
            rule = f"{len(found.indices):,} outputs are no label's text and count as wrong"
            notes.append(f"{rule}, most often {shown[0][0]!r} ({shown[0][1]:,})")
    measure = metrics.METRICS[task.metric](answers.outputs, task.references)
    return System(name, measure, notes=tuple(notes), details=details)


def _section(
    name: str,
    systems: Sequence[System],
    seed: int,
    warnings: tuple[str, ...] = (),
    facts: dict[str, Any] | None = None,
) -> Section:
    """The measures of all systems, in per cent."""
    metric = systems[0].measure.name
    values = {system.name: 100 * system.measure.value for system in systems}
    intervals = {system.name: percent(system.measure.interval(seed)) for system in systems}
    models = [system for system in systems if not system.is_baseline]
    others = [system for system in systems if system.is_baseline]
    return Section(
        name=name,
        metric=metric,
        unit="" if metric == "chrf" else "%",
        higher_is_better=True,
        rows=tuple(
            Row(
                each.name,
                None if isnan(values[each.name]) else values[each.name],
                intervals[each.name],
                len(each.measure.statistics),
                each.notes,
                each.details,
            )
            for each in models
        ),
        differences=tuple(
            PairedDifference(a.name, b.name, difference, percent(a.measure.difference(b.measure, seed)))
            for a, b in (*combinations(models, 2), *product(models, others))
            if not isnan(difference := values[a.name] - values[b.name])
        ),
        baselines=tuple(
            Baseline(each.name, values[each.name], intervals[each.name])
            for each in others
            if not isnan(values[each.name])
        ),
        warnings=warnings,
        facts=facts or {},
    )
