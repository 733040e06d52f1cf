"""What a measurement gives: one `Section`, the same for every kind, so that one table, one JSON file, one page and one
model card show them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from zerokara.evaluation.measures import LEVEL, Interval


@dataclass(frozen=True)
class Row:
    """One model's value of one metric."""

    model: str
    """Name of the model in all tables: `LoadedModel.name`."""
    value: float | None
    """In the section's unit; None for a model that is named but not ranked, with the reason in `notes`."""
    interval: Interval | None = None
    """95 % interval; None where there is none, e.g. for fewer than two documents."""
    n: int = 0
    """Documents, examples or pairs that were measured."""
    notes: tuple[str, ...] = ()
    """What a reader must know beside the value."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further numbers for the JSON and the page; JSON values only."""


@dataclass(frozen=True)
class PairedDifference:
    """The value of model `a` less that of model `b`, measured on the same documents or examples."""

    a: str
    b: str
    difference: float
    interval: Interval | None = None


@dataclass(frozen=True)
class Baseline:
    """What is reached without any of the models: chance, the majority, copying."""

    name: str
    value: float
    interval: Interval | None = None


@dataclass(frozen=True)
class Section:
    """One metric of all models on one body of data."""

    name: str
    """Heading, also the name of the data: ``bits per byte: novels``."""
    metric: str
    """Name of the metric in snake_case, also the type in a model card: ``bits_per_byte``, ``accuracy``."""
    unit: str
    """As printed behind a value: ``bits/byte``, ``%``; shares are given in per cent (50.0, not 0.5)."""
    higher_is_better: bool
    rows: tuple[Row, ...]
    differences: tuple[PairedDifference, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    warnings: tuple[str, ...] = ()
    """What limits the whole section: overlap with training data, few documents."""
    facts: dict[str, Any] = field(default_factory=dict)
    """How it was measured: sizes, window, stride; JSON values only."""
    digits: int = 2
    """Decimals shown."""

    def ranked(self) -> list[Row]:
        """The rows, best first, those without a value last."""
        sign = -1 if self.higher_is_better else 1
        return sorted(self.rows, key=lambda row: (row.value is None, sign * (row.value or 0)))

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        del found["digits"]
        for each in (*found["rows"], *found["differences"], *found["baselines"]):
            each["interval"] = each["interval"] and list(each["interval"].values())
        return found


def table(section: Section) -> Iterator[str]:
    """The table of a section: models, best first, baselines, differences, warnings, and what to know about each row."""
    yield f"\n{section.name} ({section.unit}, {'higher' if section.higher_is_better else 'lower'} is better)"
    rows = [(row.model, value_text(row.value, section), interval_text(row.interval, section), f"{row.n:,}")
            for row in section.ranked()]  # fmt: skip
    rows += [(f"({base.name})", value_text(base.value, section), interval_text(base.interval, section), "")
             for base in section.baselines]  # fmt: skip
    yield from _aligned([("", "value", f"{LEVEL:.0%} interval", "n"), *rows])
    if section.differences:
        yield "  differences on the same data (first less second)"
        yield from _aligned(
            [
                (
                    f"{each.a} - {each.b}",
                    f"{each.difference:+.{section.digits}f}",
                    interval_text(each.interval, section, "+"),
                    "" if each.interval and each.interval.excludes_zero else "not distinguished",
                )
                for each in section.differences
            ]
        )
    for row in section.rows:
        yield from (f"  {row.model}: {note}" for note in row.notes)
    yield from (f"  warning: {warning}" for warning in section.warnings)


def value_text(value: float | None, section: Section) -> str:
    """A value with the section's decimals; a dash for none."""
    return "–" if value is None else f"{value:.{section.digits}f}"


def interval_text(interval: Interval | None, section: Section, sign: str = "") -> str:
    """``1.2034 to 1.2311``; empty for none."""
    return "" if interval is None else " to ".join(f"{end:{sign}.{section.digits}f}" for end in interval.as_json())


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *others = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  " + "  ".join([first, *others]).rstrip()
