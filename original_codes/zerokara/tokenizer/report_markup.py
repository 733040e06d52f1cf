"""HTML and SVG that cannot be broken by what stands in it.

In: names, attributes and contents. Out: `Markup`. Whatever is not `Markup` already is text and is escaped, so a piece
that spells "<script>" stays seven characters and an angle.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

_EMPTY = frozenset({"meta", "br", "col", "line", "rect", "path", "circle"})
"""Elements without content: HTML's void ones, and those of SVG, which close themselves."""
_VOID = frozenset({"meta", "br", "col"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, /, *contents: object, **attributes: object) -> Markup:
    """An element. Contents are text, markup, or iterables of these; `class_` is the attribute `class`, `a_b` is `a-b`.

    An attribute that is None is left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if tag in _EMPTY:
        return Markup(f"<{tag}{given}>" if tag in _VOID else f"<{tag}{given}/>")
    return Markup(f"<{tag}{given}>{join(contents)}</{tag}>")


def join(contents: object) -> Markup:
    """Contents one behind the other."""
    if isinstance(contents, Markup):
        return contents
    if isinstance(contents, Iterable) and not isinstance(contents, str):
        return Markup("".join(map(join, contents)))
    return Markup(html.escape(str(contents), quote=False))
