"""A task → each model's score on its test data, with intervals, beside baselines, and without overlapping examples.

In: a `Task` (sources, references, a metric, the pairs that models were fine-tuned on) and the answers of each model.
Out: sections of the results: for each *system*, a model or a baseline, the metric with its 95 % interval over all test
examples, and over those that do not occur in the training data, or in the pretraining corpus; and the paired
differences between models, and of models to baselines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import isnan
from typing import Any

from zerokara.evaluation import baselines, metrics, overlap
from zerokara.evaluation.answers import Answers, Prompt
from zerokara.evaluation.baselines import Pair
from zerokara.evaluation.intervals import percent
from zerokara.evaluation.measures import Measure
from zerokara.evaluation.metrics import Unmatched
from zerokara.evaluation.overlap import Overlap
from zerokara.evaluation.results import Baseline, PairedDifference, Row, Section
from zerokara.progress import log, plural

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
    """A model or a baseline on the test data of a task."""

    name: str
    measure: Measure
    """The task's metric."""
    answers: Answers | None
    """None for a baseline."""
    unmatched: Unmatched | None
    """Outputs that are no label's text; None where there are no labels."""

    @property
    def is_baseline(self) -> bool:
        """Whether it is a baseline."""
        return self.answers is None


def sections(
    task: Task, answers: Mapping[str, Answers], overlaps: Mapping[str, Overlap], seed: int = 0
) -> list[Section]:
    """The results of a task, given each model's answers by its name, and what overlaps by what it is compared with.

    The first section is the metric on all test examples; then comes the same without the examples that overlap.
    """
    found = [_system(task, name, each.outputs, each) for name, each in answers.items()]
    found += [_system(task, each.name, each.outputs) for each in _baselines(task, seed)]
    warnings = [*task.warnings, *(_overlap_warning(name, each) for name, each in overlaps.items() if each.found)]
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
    made = [_section(title, [system.measure for system in found], found, seed, tuple(warnings), facts)]
    for name, each in overlaps.items():
        if each.found and each.rest:
            rest = [system.measure.subset(each.rest) for system in found]
            made.append(_section(f"{title}, without what occurs in the {name}", rest, found, seed))
    return made


def _section(
    name: str,
    measures: Sequence[Measure],
    systems: Sequence[System],
    seed: int,
    warnings: tuple[str, ...] = (),
    facts: dict[str, Any] | None = None,
) -> Section:
    """One measure of all systems, in per cent; with `facts`, also what is to be said of their answers."""
    first = measures[0]
    values = [100 * measure.value for measure in measures]
    found = [percent(measure.interval(seed)) for measure in measures]
    models = [at for at, system in enumerate(systems) if not system.is_baseline]
    others = [at for at, system in enumerate(systems) if system.is_baseline]
    compared = [*combinations(models, 2), *((model, other) for model in models for other in others)]
    return Section(
        name=name,
        metric=first.name,
        unit="" if first.name == "chrf" else "%",
        higher_is_better=first.higher_is_better,
        rows=tuple(
            Row(
                systems[at].name,
                None if isnan(values[at]) else values[at],
                found[at],
                len(measures[at].statistics),
                tuple(_notes(systems[at])) if facts else (),
                _details(systems[at]) if facts else {},
            )
            for at in models
        ),
        differences=tuple(
            PairedDifference(
                systems[a].name,
                systems[b].name,
                values[a] - values[b],
                percent(measures[a].difference(measures[b], seed)),
            )
            for a, b in compared
            if not isnan(values[a] - values[b])
        ),
        baselines=tuple(Baseline(systems[at].name, values[at], found[at]) for at in others if not isnan(values[at])),
        warnings=warnings,
        facts=facts or {},
    )


def _system(task: Task, name: str, outputs: list[str], answers: Answers | None = None) -> System:
    unmatched = metrics.unmatched(outputs, task.labels) if task.labels else None
    return System(name, metrics.METRICS[task.metric](outputs, task.references), answers, unmatched)


def _baselines(task: Task, seed: int) -> Iterator[baselines.Baseline]:
    log(f"{task.name}: computing baselines from {plural(len(task.train), 'training example')}")
    if task.labels:
        return baselines.for_labels(task.train, task.sources, task.references, seed)
    return baselines.for_texts(task.train, task.sources)


def _overlap_warning(name: str, found: Overlap) -> str:
    return (
        f"{len(found.found):,} of {found.num_examples:,} test examples occur in the {name}: {len(found.exact):,} "
        f"exactly, {len(found.by_ngram):,} by an n-gram of {overlap.NGRAM} tokens"
    )


def _notes(system: System) -> Iterator[str]:
    """What a reader must know beside the value of a model."""
    assert system.answers is not None
    stopped, too_long = system.answers.stopped, system.answers.num_too_long
    if too_long:
        yield f"{plural(too_long, 'prompt')} longer than the model's context: not answered"
    if cut := stopped.count(False) - too_long:
        yield f"{cut:,} of {len(stopped):,} answers did not end by themselves"
    if system.unmatched and system.unmatched.indices:
        text, count = system.unmatched.most_common[0]
        yield (
            f"{len(system.unmatched.indices):,} outputs are no label's text and count as wrong, "
            f"most often {text[:_MAX_SHOWN_CHARACTERS]!r} ({count:,})"
        )


def _details(system: System) -> dict[str, Any]:
    assert system.answers is not None
    stopped = system.answers.stopped
    found: dict[str, Any] = {"stopped": 100 * sum(stopped) / len(stopped), "too_long": system.answers.num_too_long}
    if system.unmatched is not None:
        shown = [[text[:_MAX_SHOWN_CHARACTERS], count] for text, count in system.unmatched.most_common]
        found["unmatched"] = {"outputs": len(system.unmatched.indices), "most_common": shown}
    return found
