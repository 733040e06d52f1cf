"""Escaping of foreign text in Markdown, so that it is shown and is never markup; and tables.

A corpus file may be named ``x](javascript:…)<script>.jsonl``, and a model writes anything. In: any text. Out: Markdown
that shows it. Source: CommonMark 0.31 (any ASCII punctuation may follow a backslash; four spaces start a code block),
and GitHub's tables, whose cells end at a ``|`` without a backslash.
"""

from __future__ import annotations

import re

from zerokara.progress import plain

_MARKUP = re.compile(r"[\\`*_{}\[\]()<>#!|~&$:@^]|(?<=www)\.|^[-+=]|(?<=\d)\.(?=\s|$)", re.IGNORECASE)
"""What starts emphasis, links (bare addresses too), HTML, entities, formulas, cells, headings or lists."""


def printable(text: str) -> str:
    """`text` in one line: white space becomes a space; unprintable characters (controls, bidi marks) are escaped."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in " ".join(text.split())
    )


def inline(text: str) -> str:
    """`text` within a line or the cell of a table."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def code(text: str) -> str:
    """`text` within a line, as code; not for the cell of a table."""
    line = printable(text)
    marks = "`" * (_longest_run(line) + 1)
    return f"{marks} {line} {marks}" if "`" in line else f"{marks}{line}{marks}"


def fenced(text: str) -> str:
    """`text` as a fenced code block, with a fence longer than any in it."""
    marks = "`" * max(3, _longest_run(text) + 1)
    return f"{marks}text\n{plain(text)}\n{marks}"


def indented(text: str) -> str:
    """`text` as an indented code block, at every kind of line end, so that no line of it starts a line of the file."""
    return "\n".join(f"    {plain(line)}".rstrip() for line in text.splitlines() or [""])


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table; its cells are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
