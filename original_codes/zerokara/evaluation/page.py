"""Sections → one HTML page that needs no network, no script, no font and no other file, from `page.html.jinja`.

Jinja2 escapes whatever comes from a model's or a file's name; only the plots are markup, in which matplotlib escapes: a
dot for each value and a line for its interval, one model below the other. They turn dark with the page: matplotlib
cannot draw in CSS variables, so it draws in stand-ins for them, which are replaced afterwards.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from zerokara.evaluation.measures import NUM_RESAMPLES, Interval
from zerokara.evaluation.results import Section, interval_text, value_text

_COLOURS = {"#010100": "--soft", "#010101": "--line", "#010102": "--s0", "#010103": "--s1", "#010104": "--ink"}
_OF = {variable: colour for colour, variable in _COLOURS.items()}
_WIDTH, _LINE = 720, 30
"""In points, which become units of the viewBox; height of a model's line."""
_LABEL_CHARACTERS = 34
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "evaluation",
    "font.size": 12,
    "font.family": "DejaVu Sans",
    "axes.labelcolor": _OF["--soft"],
    "xtick.labelcolor": _OF["--soft"],
    "ytick.labelcolor": _OF["--ink"],
    "grid.color": _OF["--line"],
    "axes.axisbelow": True,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
_UNUSED = re.compile(r'<defs>.*?</defs>| clip-path="[^"]*"| id="[^"]*"| transform="rotate\(-0 [^"]*"', flags=re.DOTALL)


def page(sections: Sequence[Section]) -> str:
    """The text of the page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"value": value_text, "interval": interval_text}
    return environment.get_template("page.html.jinja").render(
        # By position: nothing keeps two sections from having one name.
        shown=[(each, Markup(value_plot(each)), Markup(difference_plot(each))) for each in sections],
        num_resamples=NUM_RESAMPLES,
    )


def value_plot(section: Section) -> str:
    """Each ranked model, best on top, then the baselines."""
    points = [(_short(row.model), row.value, row.interval, "--s0") for row in section.ranked() if row.value is not None]
    points += [(_short(base.name), base.value, base.interval, "--s1") for base in section.baselines]
    return _dots(points, section.unit, f"{section.name}, values") if points else ""


def difference_plot(section: Section) -> str:
    """Each paired difference, with a line at zero."""
    points = [
        (f"{_short(each.a, 20)} - {_short(each.b, 20)}", each.difference, each.interval, "--s0")
        for each in section.differences
    ]
    return _dots(points, f"difference, {section.unit}", f"{section.name}, differences", zero=True) if points else ""


def _dots(points: list[tuple[str, float, Interval | None, str]], unit: str, label: str, zero: bool = False) -> str:
    import matplotlib  # a second to import, and only the page needs it
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
                axes.plot([interval.low, interval.high], [place, place], color=_OF[variable], linewidth=2.5)
            # A line of no length with round ends: a marker would be defined once and used by its id, as in every plot.
            axes.plot([value] * 2, [place] * 2, color=_OF[variable], linewidth=9, solid_capstyle="round")
        if zero:
            axes.axvline(0, color=_OF["--soft"], linewidth=1)
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


def _short(name: str, characters: int = _LABEL_CHARACTERS) -> str:
    return name if len(name) <= characters else "…" + name[-characters + 1 :]
