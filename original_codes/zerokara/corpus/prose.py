"""Docstrings and comments → prose: whole English sentences, without markup, code, tables and lists of parameters.

In: a docstring or a block of comments as it stands in a source. Out: its paragraphs, each on one line. A paragraph is a
run of lines with the same indentation; of its sentences those stay that consist of words and punctuation alone, and
where they are less than `MIN_SHARE` of it, none does: what is left would not be read as one text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

MIN_WORDS = 5
MIN_SHARE = 0.6
MIN_PLAIN_WORDS = 0.85
"""Share of the words of a sentence that are written as words are: names of code are not."""
MIN_FUNCTION_WORDS = 0.15
"""Share of a sentence's words that hold a sentence together; an enumeration has fewer."""

_FUNCTION_WORDS = re.compile(
    "an?|and|are|as|at|be|but|by|can|for|from|has|have|if|in|is|its?|not|of|on|one|or|so|than|that|the|their|then|there|"
    "they|this|to|was|we|were|when|which|will|with|you",
    re.IGNORECASE,
)
_MARKUP = (
    (re.compile(r":[a-z:+-]+:`~[^`]*?([^`.]+)`"), r"\1"),  # :class:`~package.Name`
    (re.compile(r"(?::[a-z:+-]+:)?`([^`<]+?)\s*<[^`>]*>`_*"), r"\1"),  # `text <target>`_
    (re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), r"\1"),  # [text](target)
    (re.compile(r"(?::[a-z:+-]+:)?``?([^`]+)``?_*"), r"\1"),  # :func:`name`, ``code``
    (re.compile(r"(?<!\w)(\*\*|\*|__|_)(\S(?:.*?\S)?)\1(?!\w)"), r"\2"),  # *emphasis*
    (re.compile("[\u2018\u2019]"), "'"),
    (re.compile("[\u201c\u201d]"), '"'),
)
_MARKED = re.compile("[`*_\\[\u2018\u2019\u201c\u201d]")
_ITEM = re.compile(r"\s*(?:[-*+•]|\(?\d+[.)])\s+(?=\S)")
_NO_PROSE = re.compile(r"\s*(?:[:@]\w|>>>|\.\.|[|+=~^#$%>]|[-=~^\"'*`]{3,})")
"""Fields such as `:param x:`, doctests, directives, tables, the lines under headings."""
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[A-Z\"'(])")
_WORDS_AND_PUNCTUATION = re.compile(r"[A-Z][A-Za-z ,.;:'\"!?()-]*[.!?][\"')]*")
_PLAIN_WORD = re.compile(r"[A-Za-z]?[a-z]+(?:['-][A-Za-z]?[a-z]+)*|I|A")


def prose(text: str) -> Iterator[str]:
    """The paragraphs of a docstring that are prose, or a part of each that is."""
    for paragraph in _paragraphs(text):
        plain = _without_markup(paragraph)
        sentences = [sentence for sentence in _SENTENCE_END.split(plain) if _is_prose(sentence)]
        if sentences and sum(map(len, sentences)) >= MIN_SHARE * len(plain):
            yield " ".join(sentences)


def _paragraphs(text: str) -> Iterator[str]:
    """Runs of lines with the same indentation, each joined to one line; without literal blocks and what is no prose."""
    lines: list[str] = []
    indentation, literal = 0, -1
    for line in inspect.cleandoc(text).split("\n"):
        depth = len(line) - len(line.lstrip())
        if literal >= 0:  # inside a block that is shown as it stands, until the indentation falls back
            if not line.strip() or depth > literal:
                continue
            literal = -1
        item = _ITEM.match(line)
        if item:
            depth = item.end()
        breaks = not line.strip() or bool(item) or bool(_NO_PROSE.match(line))
        if lines and (breaks or depth != indentation):
            yield " ".join(lines)
            lines = []
        if breaks and not item:
            continue
        indentation = depth
        lines.append(line[depth:].strip())
        if lines[-1].endswith("::"):
            literal = indentation
            yield " ".join(lines)[:-1]
            lines = []
    if lines:
        yield " ".join(lines)


def _without_markup(paragraph: str) -> str:
    if _MARKED.search(paragraph):  # most have none
        for pattern, replacement in _MARKUP:
            paragraph = pattern.sub(replacement, paragraph)
    return " ".join(paragraph.split())


def _is_prose(sentence: str) -> bool:
    words = [word.strip(",.;:'\"!?()") for word in sentence.split()]
    return (
        len(words) >= MIN_WORDS
        and _WORDS_AND_PUNCTUATION.fullmatch(sentence) is not None
        and sum(_PLAIN_WORD.fullmatch(word) is not None for word in words) >= MIN_PLAIN_WORDS * len(words)
        and sum(_FUNCTION_WORDS.fullmatch(word) is not None for word in words) >= MIN_FUNCTION_WORDS * len(words)
        and sentence.count("(") == sentence.count(")")
        and sentence.count('"') % 2 == 0
    )
