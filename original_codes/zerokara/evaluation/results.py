"""What a measurement gives: one `Section` of the results, the same for every kind, so that one table, one JSON file,
one page and one model card show them all.

In: what the modules of this room measured; out: plain values for JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zerokara.evaluation.intervals import Interval


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

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "value": self.value,
            "interval": _pair(self.interval),
            "n": self.n,
            "notes": list(self.notes),
            "details": self.details,
        }


@dataclass(frozen=True)
class PairedDifference:
    """The value of model `a` less that of model `b`, measured on the same documents or examples."""

    a: str
    b: str
    difference: float
    interval: Interval | None = None

    def as_json(self) -> dict[str, Any]:
        return {"a": self.a, "b": self.b, "difference": self.difference, "interval": _pair(self.interval)}


@dataclass(frozen=True)
class Baseline:
    """What is reached without any of the models: chance, the majority, copying."""

    name: str
    value: float
    interval: Interval | None = None

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "interval": _pair(self.interval)}


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
        return {
            "name": self.name,
            "metric": self.metric,
            "unit": self.unit,
            "higher_is_better": self.higher_is_better,
            "rows": [row.as_json() for row in self.rows],
            "differences": [difference.as_json() for difference in self.differences],
            "baselines": [baseline.as_json() for baseline in self.baselines],
            "warnings": list(self.warnings),
            "facts": self.facts,
        }


def _pair(interval: Interval | None) -> list[float] | None:
    return interval.as_json() if interval else None
