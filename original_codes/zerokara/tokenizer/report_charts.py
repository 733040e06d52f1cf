"""The drawings of the report's page: bars in HTML, curves in SVG, coloured by the page's style sheet.

In: numbers. Out: `Markup` that needs no script, no font and no picture, and that turns dark with the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from zerokara.tokenizer.report_markup import Markup, element, join
from zerokara.tokenizer.report_measures import Coverage
from zerokara.tokenizer.report_style import SERIES_COLOURS

_WIDTH, _HEIGHT = 460, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 10, 44
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM


def swatch(class_: str) -> Markup:
    """A spot of colour in front of what it means."""
    return element("span", class_=f"swatch {class_}")


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Classes of colours and what they mean."""
    return element("div", [element("span", swatch(class_), text) for class_, text in entries], class_="legend")


def series(place: int) -> int:
    """The colour of the tokenizer at a place in the order of the report."""
    return place % SERIES_COLOURS


def bar(value: float, largest: float, label: str, class_: str) -> Markup:
    """A bar with its number behind it; the longest leaves room for that."""
    width = f"width:{82 * value / largest if largest else 0:.2f}%"
    return element("div", element("span", class_=f"bar {class_}", style=width), element("span", label), class_="track")


def stack(parts: Sequence[tuple[str, str, int]]) -> Markup:
    """A bar of parts, each with its class, its name, and its number of tokens."""
    whole = sum(number for _, _, number in parts) or 1
    spans = [
        element(
            "span", class_=class_, style=f"width:{100 * number / whole:.3f}%", title=f"{name}: {number / whole:.2%}"
        )
        for class_, name, number in parts
        if number
    ]
    return element("div", spans, class_="stack")


def columns(pairs: Sequence[tuple[str, float, float]], x_title: str, label: str) -> Markup:
    """Two columns, shares of 0 to 1, over each name on the x axis."""
    top = _nice_top(max((max(first, second) for _, first, second in pairs), default=0.0))
    slot = _PLOT_WIDTH / max(len(pairs), 1)
    parts = _shares_axis(top)
    for place, (name, first, second) in enumerate(pairs):
        x, width = _LEFT + place * slot, slot * 0.39
        for offset, share, class_ in ((0.08, first, "f0"), (0.53, second, "f1")):
            height = _PLOT_HEIGHT * share / top
            box = {"x": _number(x + offset * slot), "y": _number(_TOP + _PLOT_HEIGHT - height)}
            size = {"width": _number(width), "height": _number(height)}
            parts.append(element("rect", **box, **size, rx="1.5", class_=class_))
        if len(pairs) <= 24 or place % 2 == 0:
            parts.append(_text(name, x + slot / 2, _TOP + _PLOT_HEIGHT + 17))
    parts.append(_text(x_title, _LEFT + _PLOT_WIDTH / 2, _HEIGHT - 6))
    return _drawing(parts, label)


def curves(points: Mapping[str, Sequence[Coverage]], x_title: str, label: str) -> Markup:
    """A curve a tokenizer: the share of the text over the number of pieces, which has a logarithmic axis."""
    most = max((point.pieces for line in points.values() for point in line), default=1)
    decades = max(math.log10(most), 1e-9)
    parts = _shares_axis(1.0)
    for power in range(math.floor(decades + 1e-9) + 1):
        x = _LEFT + _PLOT_WIDTH * power / decades if most > 1 else _LEFT
        at = {"x1": _number(x), "x2": _number(x), "y1": _TOP, "y2": _TOP + _PLOT_HEIGHT}
        parts += [element("line", **at, class_="grid"), _text(f"{10**power:,}", x, _TOP + _PLOT_HEIGHT + 17)]
    for place, line in reversed(list(enumerate(points.values()))):  # ours last, on top
        places = [
            (_LEFT + _PLOT_WIDTH * math.log10(point.pieces) / decades, _TOP + _PLOT_HEIGHT * (1 - point.share_of_text))
            for point in line
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts += [element("path", d=f"M{path}", class_=f"curve c{series(place)}")] if places else []
    parts.append(_text(x_title, _LEFT + _PLOT_WIDTH / 2, _HEIGHT - 6))
    return _drawing(parts, label)


def _shares_axis(top: float) -> list[Markup]:
    parts = []
    for step in range(5):
        y = _TOP + _PLOT_HEIGHT * (1 - step / 4)
        at = {"x1": _LEFT, "x2": _LEFT + _PLOT_WIDTH, "y1": _number(y), "y2": _number(y)}
        parts.append(element("line", **at, class_="grid"))
        parts.append(_text(f"{top * step / 4 * 100:.3g}%", _LEFT - 6, y + 4, anchor="end"))
    return parts


def _drawing(parts: Sequence[Markup], label: str) -> Markup:
    return element("svg", join(parts), viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=label)


def _text(text: str, x: float, y: float, anchor: str = "middle") -> Markup:
    return element("text", text, x=_number(x), y=_number(y), text_anchor=anchor)


def _nice_top(largest: float) -> float:
    """The end of an axis of four steps that holds the largest share."""
    return next((top for top in (0.04, 0.08, 0.12, 0.2, 0.28, 0.4, 0.6, 0.8) if top >= largest), 1.0)


def _number(value: float) -> str:
    return f"{value:.1f}"
