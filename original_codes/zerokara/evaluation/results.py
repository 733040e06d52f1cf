"""Results of an evaluation: a `Section` for each metric on each body of data, shown as a table, as JSON, on a page.

The page (`page.html.jinja`) is one HTML file that needs no network, no script, no font and no other file. Jinja2
escapes whatever comes from a model's or a file's name; only the plots are markup, in which matplotlib escapes: a dot
for each value and a line for its interval, one model below the other.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerokara.evaluation.scoring import LEVEL, NUM_RESAMPLES, Interval
from zerokara.pages import template


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
class Baseline:
    """Value of a simple method, without any of the models: the majority, copying."""

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
            each["interval"] = each["interval"] and list(each["interval"].values())
        return values


def value_text(value: float | None, section: Section) -> str:
    """A value with the section's decimals; a dash for none."""
    return "–" if value is None else f"{value:.{section.digits}f}"


def interval_text(interval: Interval | None, section: Section, sign: str = "") -> str:
    """``1.2034 to 1.2311``; empty for none."""
    return "" if interval is None else " to ".join(f"{end:{sign}.{section.digits}f}" for end in interval.as_json())


def table(section: Section) -> Iterator[str]:
    """Lines of a section's table: models, best first, baselines, differences, notes, warnings."""
    yield f"\n{section.name} ({section.unit}, {'higher' if section.higher_is_better else 'lower'} is better)"
    shown = [(row.model, row.value, row.interval, f"{row.n:,}") for row in section.ranked()]
    shown += [(f"({base.name})", base.value, base.interval, "") for base in section.baselines]
    cells = [(name, value_text(value, section), interval_text(ends, section), n) for name, value, ends, n in shown]
    yield from _aligned([("", "value", f"{LEVEL:.0%} interval", "n"), *cells])
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


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Lines of equally wide columns, the first left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        yield "  " + "  ".join(cells).rstrip()


def page(sections: Sequence[Section]) -> str:
    """Text of the HTML page."""
    from markupsafe import Markup

    made = template(Path(__file__).with_name("page.html.jinja"), value=value_text, interval=interval_text)
    return made.render(
        # By position: nothing keeps two sections from having one name.
        shown=[(each, Markup(value_plot(each)), Markup(difference_plot(each))) for each in sections],
        num_resamples=NUM_RESAMPLES,
    )


def value_plot(section: Section) -> str:
    """SVG of each ranked model, best on top, then the baselines."""
    points = [(_short(row.model), row.value, row.interval, "--s0") for row in section.ranked() if row.value is not None]
    points += [(_short(base.name), base.value, base.interval, "--s1") for base in section.baselines]
    return _dots(points, section.unit, f"{section.name}, values") if points else ""


def difference_plot(section: Section) -> str:
    """SVG of each paired difference, with a line at zero."""
    points = [
        (f"{_short(each.a, 20)} - {_short(each.b, 20)}", each.difference, each.interval, "--s0")
        for each in section.differences
    ]
    return _dots(points, f"difference, {section.unit}", f"{section.name}, differences", zero=True) if points else ""


_COLOURS = {"#010100": "--soft", "#010101": "--line", "#010102": "--s0", "#010103": "--s1", "#010104": "--ink"}
"""Stand-ins for the page's CSS variables, in which matplotlib cannot draw; replaced afterwards, for the dark page."""
_COLOUR_OF = {variable: colour for colour, variable in _COLOURS.items()}
_WIDTH, _LINE = 720, 30
"""Width, and height of a model's line, in points, which become units of the viewBox."""
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "evaluation",
    "font.size": 12,
    "font.family": "DejaVu Sans",
    "axes.labelcolor": _COLOUR_OF["--soft"],
    "xtick.labelcolor": _COLOUR_OF["--soft"],
    "ytick.labelcolor": _COLOUR_OF["--ink"],
    "grid.color": _COLOUR_OF["--line"],
    "axes.axisbelow": True,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
_UNUSED = re.compile(r'<defs>.*?</defs>| clip-path="[^"]*"| id="[^"]*"| transform="rotate\(-0 [^"]*"', flags=re.DOTALL)


def _dots(points: list[tuple[str, float, Interval | None, str]], unit: str, label: str, zero: bool = False) -> str:
    import matplotlib  # a second to import, and only the page needs it
    from markupsafe import escape
    from matplotlib.figure import Figure

    height = 60 + _LINE * len(points)
    names = [name for name, *_ in points]
    left = 24 + 7.2 * max(map(len, names))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH / 72, height / 72))
        figure.subplots_adjust(left=left / _WIDTH, right=1 - 24 / _WIDTH, top=1 - 8 / height, bottom=48 / height)
        axes = figure.subplots()
        axes.spines[:].set_visible(False)
        axes.grid(axis="x")
        for place, (_, value, interval, variable) in enumerate(points):
            if interval is not None:
                axes.plot(interval.as_json(), [place, place], color=_COLOUR_OF[variable], linewidth=2.5)
            # A line of no length with round ends: a marker would be defined once and used by its id, as in every plot.
            axes.plot([value] * 2, [place] * 2, color=_COLOUR_OF[variable], linewidth=9, solid_capstyle="round")
        if zero:
            axes.axvline(0, color=_COLOUR_OF["--soft"], linewidth=1)
        axes.margins(x=0.08)
        axes.set_ylim(len(points) - 0.5, -0.5)
        axes.set_yticks(range(len(points)), names)
        axes.set_xlabel(unit)
        file = io.StringIO()
        bare = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=bare)
    svg = _UNUSED.sub("", file.getvalue())
    for colour, variable in _COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    contents = svg[svg.index(">", svg.index("<svg")) + 1 :]
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">{contents}'


def _short(name: str, characters: int = 34) -> str:
    return name if len(name) <= characters else "…" + name[-characters + 1 :]
