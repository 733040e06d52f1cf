"""The charts of the report's page: matplotlib's SVG, in the colours of the page's style sheet.

In: numbers. Out: SVG elements that need no script and no font, and turn dark with the page. matplotlib cannot draw in
CSS variables, so it draws in stand-ins for them (`_COLOURS`), which are replaced afterwards.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zerokara.tokenizer.report_measures import Coverage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES_COLOURS = 6
"""Colours of the tokenizers, ours first (--s0 to --s5 of the page)."""
_COLOURS = {
    "#010100": "--soft",
    "#010101": "--line",
    "#010102": "--k-piece",
    "#010103": "--k-byte",
    **{f"#0102{number:02x}": f"--s{number}" for number in range(SERIES_COLOURS)},
}
_OF = {variable: colour for colour, variable in _COLOURS.items()}
_WIDTH, _HEIGHT = 460, 290
"""In points, which become units of the viewBox."""
_MARGINS = {"left": 44 / _WIDTH, "right": 1 - 10 / _WIDTH, "top": 1 - 10 / _HEIGHT, "bottom": 44 / _HEIGHT}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # Text stays text, in the page's font.
    "svg.hashsalt": "report",  # The same numbers give the same file.
    "font.size": 12,
    "font.family": "DejaVu Sans",  # matplotlib's own, to measure text with
    "axes.labelcolor": _OF["--soft"],
    "xtick.labelcolor": _OF["--soft"],
    "ytick.labelcolor": _OF["--soft"],
    "grid.color": _OF["--line"],
    "grid.linewidth": 1,
    "axes.axisbelow": True,
    "axes.labelpad": 7,
    "xtick.major.pad": 7,
    "ytick.major.pad": 6,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
}
_UNUSED = re.compile(
    r'<defs>.*?</defs>| clip-path="[^"]*"| id="(?!coverage)[^"]*"| transform="rotate\(-0 [^"]*"', flags=re.DOTALL
)
"""Clipping (nothing leaves the axes), a style sheet for the whole page, and ids that two charts would share."""


def piece_lengths(pairs: Sequence[tuple[int, float, float]]) -> str:
    """Histogram: for each number of characters the share (0 to 1) of the vocabulary, and of the tokens."""

    def draw(axes: Axes) -> None:
        for offset, column, variable in ((-0.225, 1, "--k-piece"), (0.225, 2, "--k-byte")):
            shares = [100 * pair[column] for pair in pairs]
            axes.bar([pair[0] + offset for pair in pairs], shares, width=0.39, color=_OF[variable])
        axes.set_ylim(0, 100 * _nice_top(max((max(pair[1:]) for pair in pairs), default=0.0)))
        axes.set_xlim(0.5, max(len(pairs), 1) + 0.5)
        axes.set_xticks(range(1, len(pairs) + 1, 1 if len(pairs) <= 24 else 2))
        axes.set_xlabel("characters in the piece")

    return _chart(draw, "Histogram of the lengths of the pieces")


def coverage(series: Sequence[Sequence[Coverage]]) -> str:
    """A curve for each tokenizer: the share of the text over the number of pieces, on a logarithmic axis."""

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        for place, points in reversed(list(enumerate(series))):  # ours last, on top
            x, y = [point.pieces for point in points], [100 * point.share_of_text for point in points]
            axes.plot(x, y, color=_OF[f"--s{place % SERIES_COLOURS}"], linewidth=2.25, gid=f"coverage-{place}")
        most = max((point.pieces for points in series for point in points), default=1)
        axes.set_xlim(1, max(most, 10))
        axes.set_ylim(0, 100)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.minorticks_off()
        axes.grid(axis="x")
        axes.set_xlabel("number of pieces, most frequent first")

    return _chart(draw, "Coverage of the text")


def _chart(draw: Any, label: str) -> str:
    import matplotlib  # a second to import, and only the page needs it
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72))
        figure.subplots_adjust(**_MARGINS)
        axes = figure.subplots()
        axes.spines[:].set_visible(False)
        axes.grid(axis="y")
        draw(axes)
        axes.set_yticks([share * axes.get_ylim()[1] / 4 for share in range(5)])
        axes.yaxis.set_major_formatter("{x:.3g}%")
        file = io.StringIO()
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = _UNUSED.sub("", file.getvalue())
    for colour, variable in _COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    contents = svg[svg.index(">", svg.index("<svg")) + 1 :]
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{contents}'


def _nice_top(largest: float) -> float:
    """The end of an axis of four steps that holds the largest share."""
    return next((top for top in (0.04, 0.08, 0.12, 0.2, 0.28, 0.4, 0.6, 0.8) if top >= largest), 1.0)
