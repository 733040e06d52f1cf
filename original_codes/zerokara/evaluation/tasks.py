"""Tasks: each model's score on test data, with intervals, beside baselines, and without overlapping examples.

In: a `TaskData` (sources, references, a metric, the pairs that models were fine-tuned on) and the models. Out: sections
of the results: for each model and baseline the metric with its 95 % interval over all test examples, and over those
that do not occur in the training data, or in the pretraining corpus; and the paired differences between models, and of
models to baselines.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, product
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokara.base.progress import log, plural
from zerokara.evaluation import baselines, overlap, scoring
from zerokara.evaluation.answers import Answers, answers_of
from zerokara.evaluation.inputs import TaskData
from zerokara.evaluation.overlap import Overlap
from zerokara.evaluation.results import PairedDifference, Row, Section
from zerokara.evaluation.scoring import Interval, Measure
from zerokara.examples import facts

if TYPE_CHECKING:
    from zerokara.evaluation.models import LoadedModel

_MAX_SHOWN, _MAX_SHOWN_CHARACTERS = 5, 80
"""Maximum number, and length, of the outputs shown that are no label's text."""


def measure_tasks(
    tasks: Iterable[tuple[TaskData, dict[str, Overlap]]],
    models: Sequence["LoadedModel"],
    *,
    seed: int,
    cache: Path | None,
) -> Iterator[Section]:
    """Yield every section of every task, which comes with its overlaps; `cache` is a folder for answers.

    Raises:
        RunError: a model cannot be asked: it has no end token.
    """
    answered = [(task, overlaps, dict[str, Answers]()) for task, overlaps in tasks]
    for model in models:  # each answers all tasks before the next one is loaded
        for task, _, answers in answered:
            tuned = facts.read(model.folder)
            if task.conversations and not model.tokenizer.chat_template:
                answers[model.name] = Answers([], [], 0, note="not asked: it has no chat template for conversations")
                continue
            prompts, words = task.prompts(model.is_encoder_decoder, tuned), tuned.label_words if tuned else {}
            expected = [*words.values(), *task.references, *task.labels]
            found = answers_of(model, prompts, expected, task.max_new_tokens, task.name, cache)
            if task.labels and words.keys() >= {*task.labels}:  # the settings gave these labels no words
                labels = {scoring.clean(word): label for label, word in words.items()}
                found = replace(found, outputs=[labels.get(scoring.clean(text), f"({text})") for text in found.outputs])
            if tuned and tuned.task == "messages" and not task.conversations:
                found = replace(found, note="fine-tuned on conversations, and asked without its chat template")
            answers[model.name] = found
    for task, overlaps, answers in answered:
        yield from sections(task, answers, overlaps, seed)


def sections(
    task: TaskData, answers: Mapping[str, Answers], overlaps: Mapping[str, Overlap], seed: int = 0
) -> Iterator[Section]:
    """Yield the results of a task, given the answers by model, and the overlaps by the name of the other data."""
    metric = scoring.METRICS[task.metric]
    measures = {name: metric(each.outputs, task.references) for name, each in answers.items() if each.outputs}
    log(f"{task.name}: computing baselines from {plural(len(task.train), 'training example')}")
    simple = baselines.for_texts(task.train, task.sources)
    if task.labels:
        simple = baselines.for_labels(task.train, task.sources, task.references)
    baseline_measures = {name: metric(outputs, task.references) for name, outputs in simple}
    title = f"task: {task.name}, {task.metric.replace('_', ' ')}"
    facts = {
        "examples": len(task.references),
        "training_pairs": len(task.train),
        "max_new_tokens": {name: each.max_new_tokens for name, each in answers.items()},
        "overlap": {
            name: {"exact": len(each.exact), "by_ngram": len(each.by_ngram), "examples": len(each.found)}
            for name, each in overlaps.items()
        },
    }
    warnings = [
        f"{len(each.found):,} of {each.num_examples:,} test examples occur in the {name}: {len(each.exact):,} exactly, "
        f"{len(each.by_ngram):,} by {overlap.NGRAM} words in a row"
        for name, each in overlaps.items()
        if each.found
    ]
    whole = _section(title, measures, baseline_measures, seed)
    rows = tuple(_with_notes(row, task, answers[row.model]) for row in whole.rows)
    rows += tuple(Row(name, None, notes=(each.note,)) for name, each in answers.items() if not each.outputs)
    yield replace(whole, rows=rows, warnings=(*task.warnings, *warnings), facts=facts)
    for name, each in overlaps.items():
        if each.found and each.rest:
            models, others = (
                {system: measure.subset(each.rest) for system, measure in group.items()}
                for group in (measures, baseline_measures)
            )
            yield _section(f"{title}, without what occurs in the {name}", models, others, seed)


def _with_notes(row: Row, task: TaskData, answers: Answers) -> Row:
    """A row with notes and details on how its model answered."""
    notes = [answers.note] if answers.note else []
    stopped, too_long = answers.stopped, answers.num_too_long
    details: dict[str, Any] = {"stopped": 100 * sum(stopped) / len(stopped), "too_long": too_long}
    if too_long:
        notes.append(f"{plural(too_long, 'prompt')} longer than the model's context: not answered")
    if cut := stopped.count(False) - too_long:
        notes.append(f"{cut:,} of {len(stopped):,} answers did not end by themselves")
    if task.labels:
        unmatched = scoring.unmatched(answers.outputs, task.labels)
        shown = [[text[:_MAX_SHOWN_CHARACTERS], count] for text, count in Counter(unmatched).most_common(_MAX_SHOWN)]
        details["unmatched"] = {"outputs": len(unmatched), "most_common": shown}
        if shown:
            rule = f"{len(unmatched):,} outputs are no label's text and count as wrong"
            notes.append(f"{rule}, most often {shown[0][0]!r} ({shown[0][1]:,})")
    return replace(row, notes=tuple(notes), details=details)


def _section(name: str, models: Mapping[str, Measure], others: Mapping[str, Measure], seed: int) -> Section:
    """The measures of models and baselines, in per cent; a value that is NaN is left out, or None for a model."""

    def percent(interval: Interval | None) -> Interval | None:
        return interval and Interval(100 * interval.low, 100 * interval.high)

    def row(name: str, measure: Measure) -> Row:
        value = None if isnan(measure.value) else 100 * measure.value
        return Row(name, value, percent(measure.interval(seed)), len(measure.statistics))

    metric = next(chain(models.values(), others.values())).name
    return Section(
        name=name,
        metric=metric,
        unit="" if metric == "chrf" else "%",
        higher_is_better=True,
        rows=tuple(row(name, each) for name, each in models.items()),
        differences=tuple(
            PairedDifference(a, b, 100 * difference, percent(one.difference(other, seed)))
            for (a, one), (b, other) in (*combinations(models.items(), 2), *product(models.items(), others.items()))
            if not isnan(difference := one.value - other.value)
        ),
        baselines=tuple(row(name, each) for name, each in others.items() if not isnan(each.value)),
    )
