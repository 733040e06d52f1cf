"""Escaping of foreign text in Markdown, so that it is shown and is never markup.

A corpus file may be named ``x](javascript:…)<script>.jsonl``, and a model writes anything. Source: CommonMark 0.31 (any
ASCII punctuation may follow a backslash; four spaces start a code block), and GitHub's tables, whose cells end at a
``|`` without a backslash.
"""

from __future__ import annotations

import re

from zerokara.progress import plain

_MARKUP = re.compile(r"[\\`*_{}\[\]()<>#!|~&$:@^]|(?<=www)\.|^[-+=]|(?<=\d)\.(?=\s|$)", re.IGNORECASE)
"""What starts emphasis, links (bare addresses too), HTML, entities, formulas, cells, headings or lists."""


def inline(text: str) -> str:
    """`text` within a line or the cell of a table; what does not print is spelt out."""
    line = " ".join(text.split())
    shown = (each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in line)
    return _MARKUP.sub(r"\\\g<0>", "".join(shown))


def indented(text: str) -> str:
    """`text` as a code block, indented at every kind of line end, so that no line of it starts a line of the file."""
    return "\n".join(f"    {plain(line)}".rstrip() for line in text.splitlines() or [""])
