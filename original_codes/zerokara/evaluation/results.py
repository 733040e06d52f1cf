"""Results of an evaluation: a `Section` for each metric on each body of data, shown as a table, as JSON, on a page, and
as `model-index` metadata at the head of a model card, as the Hub shows it.

The page (`page.html.jinja`) is one HTML file that needs no network, no script, no font and no other file. Jinja2
escapes whatever comes from a model's or a file's name. Beside each number stands a dot on a line for its interval.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import regex

from zerokara.base.pages import template
from zerokara.evaluation.scoring import LEVEL, NUM_RESAMPLES, Interval
from zerokara.publishing import exported_folder


@dataclass(frozen=True)
class Row:
    """One model's value of one metric."""

    model: str
    """Name of the model in all tables (`LoadedModel.name`), or of a baseline."""
    value: float | None
    """Value in the section's unit; None for a model that is named but not ranked, with the reason in `notes`."""
    interval: Interval | None = None
    """95 % interval; None where there is none, e.g. for fewer than two documents."""
    n: int = 0
    """Number of documents, examples or pairs that were measured."""
    notes: tuple[str, ...] = ()
    """Remarks that a reader needs beside the value."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further numbers for the JSON file; JSON values only."""


@dataclass(frozen=True)
class PairedDifference:
    """Value of model `a` less that of model `b`, measured on the same documents or examples."""

    a: str
    b: str
    difference: float
    interval: Interval | None = None


@dataclass(frozen=True)
class Section:
    """One metric of all models on one body of data."""

    name: str
    """Heading, also the name of the data: ``bits per byte: novels``."""
    metric: str
    """Name of the metric in snake_case, also the type in a model card: ``bits_per_byte``, ``accuracy``."""
    unit: str
    """Unit behind a value: ``bits/byte``, ``%``; shares are given in per cent (50.0, not 0.5)."""
    higher_is_better: bool
    rows: tuple[Row, ...]
    differences: tuple[PairedDifference, ...] = ()
    baselines: tuple[Row, ...] = ()
    """Simple methods, without any of the models: the majority, copying."""
    warnings: tuple[str, ...] = ()
    """Limits of the whole section: overlap with training data, few documents."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Sizes and settings of the measurement; JSON values only."""
    digits: int = 2
    """Decimals shown."""

    def ranked(self) -> list[Row]:
        """The rows, best first, those without a value last."""
        sign = -1 if self.higher_is_better else 1
        return sorted(self.rows, key=lambda row: (row.value is None, sign * (row.value or 0)))

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["digits"]
        for each in (*values["rows"], *values["differences"], *values["baselines"]):
            each["interval"] = each["interval"] and list(each["interval"])
        return values


def value_text(value: float | None, section: Section) -> str:
    """A value with the section's decimals; a dash for none."""
    return "–" if value is None else f"{value:.{section.digits}f}"


def interval_text(interval: Interval | None, section: Section, sign: str = "") -> str:
    """``1.2034 to 1.2311``; empty for none."""
    return "" if interval is None else " to ".join(f"{end:{sign}.{section.digits}f}" for end in interval)


def table(section: Section) -> Iterator[str]:
    """Lines of a section's table: models, best first, baselines, differences, notes, warnings."""
    yield f"\n{section.name} ({section.unit}, {'higher' if section.higher_is_better else 'lower'} is better)"
    shown = [(row.model, row.value, row.interval, f"{row.n:,}") for row in section.ranked()]
    shown += [(f"({base.model})", base.value, base.interval, "") for base in section.baselines]
    cells = [(name, value_text(value, section), interval_text(ends, section), n) for name, value, ends, n in shown]
    yield from _aligned([("", "value", f"{LEVEL:.0%} interval", "n"), *cells])
    if section.differences:
        yield "  differences on the same data (first minus second)"
        cells = []
        for each in section.differences:
            value, ends = f"{each.difference:+.{section.digits}f}", interval_text(each.interval, section, "+")
            verdict = "" if each.interval and each.interval.excludes_zero else "not distinguished"
            cells.append((f"{each.a} - {each.b}", value, ends, verdict))
        yield from _aligned(cells)
    for row in section.rows:
        yield from (f"  {row.model}: {note}" for note in row.notes)
    yield from (f"  warning: {warning}" for warning in section.warnings)


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Lines of equally wide columns, the first left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        yield "  " + "  ".join(cells).rstrip()


def page(sections: Sequence[Section]) -> str:
    made = template(Path(__file__).with_name("page.html.jinja"), value=value_text, interval=interval_text)
    shown = []
    for each in sections:
        values = [(row.value, row.interval) for row in (*each.rows, *each.baselines)]
        differences = [(pair.difference, pair.interval) for pair in each.differences]
        shown.append((each, _scale(values), _scale([(0.0, None), *differences])))
    return made.render(shown=shown, num_resamples=NUM_RESAMPLES)


def _scale(points: Sequence[tuple[float | None, Interval | None]]) -> Callable[[float], float]:
    """Return where a value stands, from 0 to 100, on a line that holds all points and their intervals."""
    known = [value for value, _ in points if value is not None]
    known += [end for _, interval in points if interval for end in interval]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return lambda value: round(100 * (value - low) / ((high - low) or 1.0), 2)


def add_to_card(folder: Path, model: str, sections: Sequence[Section]) -> Path:
    """Write the values of the model named `model` into the card in its folder, which is made if there is none."""
    exported_folder.write_card(folder, with_results(exported_folder.read_card(folder), model, sections))
    return folder / exported_folder.CARD_NAME


def with_results(card: str, model: str, sections: Sequence[Section]) -> str:
    """Return the text of a card with results added, in place of older ones on the same data."""
    from huggingface_hub import ModelCard

    content = ModelCard(card)
    data: Any = content.data  # a ModelCardData
    rows = [(row, section) for section in sections for row in section.rows if row.model == model]
    added = [_result(row, row.value, section) for row, section in rows if row.value is not None]
    if not added:
        return card
    replaced = set(map(_measured, added))
    data.eval_results = [*(old for old in data.eval_results or [] if _measured(old) not in replaced), *added]
    data.model_name = data.model_name or model
    return str(content)


def _result(row: Row, value: float, section: Section) -> Any:
    from huggingface_hub import EvalResult

    interval = f"95 % interval {interval_text(row.interval, section)}, " if row.interval else ""
    data = str(section.facts.get("text", section.name))
    return EvalResult(
        task_type="text-generation",
        dataset_type=regex.sub(r"[^\w.-]+", "-", data),  # what the Hub tells data sets apart by
        dataset_name=data,
        metric_type=section.metric,
        metric_name=f"{section.metric.replace('_', ' ')} ({interval}n = {row.n:,})",
        metric_value=round(value, section.digits),
    )


def _measured(result: Any) -> tuple[str, ...]:
    """What a result measures: an older one of the same is replaced."""
    return result.task_type, result.dataset_type, result.dataset_name, result.metric_type
