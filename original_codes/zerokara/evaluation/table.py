"""Sections → plain text for the screen."""

from __future__ import annotations

from collections.abc import Iterator

from zerokara.evaluation.intervals import LEVEL, Interval
from zerokara.evaluation.results import Section


def lines(section: Section) -> Iterator[str]:
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
