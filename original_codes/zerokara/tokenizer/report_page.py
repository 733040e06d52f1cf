"""Rendering of the report as a page and as plain text (`report.html.jinja`, `report.txt.jinja`).

The page is one HTML file that needs no network, no script and no other file. Jinja2 escapes whatever comes from a
corpus or a vocabulary; only the two charts, matplotlib's SVG, are markup. matplotlib cannot draw in the page's CSS
variables, so it draws in stand-ins (`_COLOURS`), which are replaced afterwards.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Template
from markupsafe import Markup

from zerokara.pages import template
from zerokara.progress import bytes_text, plural
from zerokara.tokenizer.model_file import SPACE_MARK
from zerokara.tokenizer.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES_COLOURS = 6
"""Colours of the tokenizers, ours first (--s0 to --s5 of the page)."""
_NUM_UNUSED_SHOWN = 50
_SPACES = {" ": "·", "\t": "→", "\u3000": "□", "\u00a0": "⍽"}
"""Marks drawn over spaces to make them visible; the space itself stays, to break lines at and to copy."""

_COLOURS = {
    "#010100": "--soft",
    "#010101": "--line",
    "#010102": "--k-piece",
    "#010103": "--k-byte",
    **{f"#0102{number:02x}": f"--s{number}" for number in range(SERIES_COLOURS)},
}
_OF = {variable: colour for colour, variable in _COLOURS.items()}
_WIDTH, _HEIGHT = 460, 290
"""Size of a chart in points, which become units of the viewBox."""
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


def page(report: Report) -> str:
    """Render the report as one HTML page."""
    tokens = report.usage_tokens or 1
    pieces = sum(each["pieces"] for each in report.piece_lengths) or 1
    lengths = [(one["characters"], one["pieces"] / pieces, one["tokens"] / tokens) for one in report.piece_lengths]
    step = max(1, len(report.unused_pieces) // _NUM_UNUSED_SHOWN)
    measures = [(source.source, name, m) for source in report.sources for name, m in source.tokenizers.items()]
    return _template("report.html.jinja").render(
        report=report,
        largest=max((m.rates()["bytes_per_token"] for _, _, m in measures), default=0),
        changed=[each for each in measures if each[2].failure_examples],
        num_series=SERIES_COLOURS,
        piece_length_chart=Markup(length_chart(lengths)),
        coverage_chart=Markup(coverage_chart(list(report.coverage.values()))) if any(report.coverage.values()) else "",
        frequent=[(piece, f"{count:,}", f"{count / tokens:.2%}") for piece, count in report.most_frequent],
        longest=[(piece, len(piece), f"{count:,}") for piece, count in report.longest],
        unused=[(piece, len(piece)) for piece in report.unused_pieces[::step][:_NUM_UNUSED_SHOWN]],
    )


def text(report: Report) -> str:
    """Render the report as plain text."""
    return _template("report.txt.jinja").render(report=report)


def _template(name: str) -> Template:
    made = template(
        Path(__file__).with_name(name),
        bytes=bytes_text,
        count="{:,}".format,
        fixed=lambda value: "n/a" if value is None else f"{value:.3f}",
        percent=lambda share, digits: f"{share:.{digits}%}",
        segments=segments,
        language=language,
        spelt=spelt,
        repr=repr,
        shown=lambda piece: piece if piece.isprintable() else repr(piece),
    )
    made.globals["plural"] = plural
    return made


def segments(text: str) -> Iterator[tuple[str, str, str]]:
    """Split into runs of printable text, spaces and unprintable characters: the kind, the text shown, and its mark."""
    for is_run, characters in groupby(text.replace(SPACE_MARK, " "), lambda c: c.isprintable() and c not in _SPACES):
        if is_run:
            yield "text", "".join(characters), ""
            continue
        for character in characters:
            mark = _SPACES.get(character, "")
            yield ("space", character, mark) if mark else ("control", spelt(character), "")


def spelt(text: str) -> str:
    """Replace each unprintable character by Python's escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def language(text: str) -> str:
    """Language whose glyphs are meant, where the script decides it (Han alone does not); else empty."""
    if any("\u3040" <= character <= "\u30ff" for character in text):
        return "ja"
    return "ko" if any("\uac00" <= character <= "\ud7a3" for character in text) else ""


def length_chart(pairs: Sequence[tuple[int, float, float]]) -> str:
    """Draw a histogram: for each number of characters the share (0 to 1) of the vocabulary, and of the tokens."""

    def draw(axes: Axes) -> None:
        for offset, column, variable in ((-0.225, 1, "--k-piece"), (0.225, 2, "--k-byte")):
            shares = [100 * pair[column] for pair in pairs]
            axes.bar([pair[0] + offset for pair in pairs], shares, width=0.39, color=_OF[variable])
        largest = max((max(pair[1:]) for pair in pairs), default=0.0)
        # Four steps of an axis that ends at a round number.
        axes.set_ylim(0, 100 * next((top for top in (0.04, 0.08, 0.12, 0.2, 0.28, 0.4, 0.6, 0.8) if top >= largest), 1))
        axes.set_xlim(0.5, max(len(pairs), 1) + 0.5)
        axes.set_xticks(range(1, len(pairs) + 1, 1 if len(pairs) <= 24 else 2))
        axes.set_xlabel("characters in the piece")

    return _chart(draw, "Histogram of the lengths of the pieces")


def coverage_chart(series: Sequence[Sequence[dict[str, float]]]) -> str:
    """Draw a curve for each tokenizer: the share of the text over the number of pieces, on a logarithmic axis."""

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        for place, points in reversed(list(enumerate(series))):  # ours last, on top
            x, y = [point["pieces"] for point in points], [100 * point["share_of_text"] for point in points]
            axes.plot(x, y, color=_OF[f"--s{place % SERIES_COLOURS}"], linewidth=2.25, gid=f"coverage-{place}")
        most = max((point["pieces"] for points in series for point in points), default=1)
        axes.set_xlim(1, max(most, 10))
        axes.set_ylim(0, 100)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.minorticks_off()
        axes.grid(axis="x")
        axes.set_xlabel("number of pieces, most frequent first")

    return _chart(draw, "Coverage of the text")


def _chart(draw: Callable[[Axes], None], label: str) -> str:
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
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    svg = _UNUSED.sub("", file.getvalue())
    for colour, variable in _COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    contents = svg[svg.index(">", svg.index("<svg")) + 1 :]
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{contents}'
