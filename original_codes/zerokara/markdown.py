"""Texts of others in Markdown of ours: they are read as what they say, and are never markup.

A corpus file may be called ``x](javascript:…)<script>.jsonl``, and a model writes whatever it likes. In: any text. Out:
Markdown that shows it. Source: CommonMark 0.31 (any ASCII punctuation may stand behind a backslash; spaces of four
begin a block of code), and GitHub's tables, whose cells end at a ``|`` without a backslash.
"""

from __future__ import annotations

import re

_MARKUP = re.compile(r"[\\`*_{}\[\]()<>#!|~&$:@^]|(?<=www)\.|^[-+=]|(?<=\d)\.(?=\s|$)", re.IGNORECASE)
"""What begins emphasis, links (bare addresses too), HTML, entities, formulas, cells, headings or lists."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All but the tab and the line end; a terminal obeys some of them."""


def printable(text: str) -> str:
    """`text` in one line: white space is a space; what does not print (controls, turned directions) is spelt out."""
    return "".join(each if each.isprintable() else _spelt(each) for each in " ".join(text.split()))


def inline(text: str) -> str:
    """`text` within a line or the cell of a table."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def code(text: str) -> str:
    """`text` within a line, as code; not for the cell of a table."""
    line = printable(text)
    marks = "`" * (_longest_run(line) + 1)
    return f"{marks} {line} {marks}" if "`" in line else f"{marks}{line}{marks}"


def fenced(text: str) -> str:
    """`text` as a block of code between marks longer than any in it."""
    marks = "`" * max(3, _longest_run(text) + 1)
    return f"{marks}text\n{_CONTROLS.sub(lambda found: _spelt(found[0]), text)}\n{marks}"


def indented(text: str) -> str:
    """`text` as a block of code of which no line begins a line of the file; at every kind of line end there is one."""
    lines = [_CONTROLS.sub(lambda found: _spelt(found[0]), line) for line in text.splitlines()]
    return "\n".join(f"    {line}".rstrip() for line in lines or [""])


def _spelt(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
