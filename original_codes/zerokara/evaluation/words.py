"""Sentences of held-out text and the words in them, in any script: what probes are made of.

In: documents. Out: `Sentence`, one line or a part of one that ends in a full stop or the like, with the place of each
word in it.

A word is a run of letters, marks and digits, with apostrophes and hyphens inside. Scripts that put no space between
words have no such runs. In a sentence with kana (Japanese) a word is a run of one script: kanji, hiragana or katakana;
coarser than a dictionary's word here and there, but it needs none, and rare runs are not asked. In other text without
spaces (Chinese, Thai, Lao, Khmer, Burmese) each character stands for a word, with its marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import regex

_KANA = regex.compile(r"[\p{Hiragana}\p{Katakana}]")
UNSPACED = r"\p{Hiragana}\p{Katakana}\p{Han}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_SPACED_WORD = rf"(?:(?![{UNSPACED}])[\p{{L}}\p{{M}}\p{{N}}])+(?:['’\-](?:(?![{UNSPACED}])[\p{{L}}\p{{M}}\p{{N}}])+)*"
_WITH_SCRIPT_RUNS = regex.compile(rf"[\p{{Katakana}}ー]+|\p{{Han}}+|[\p{{Hiragana}}ー]+|{_SPACED_WORD}")
_WITH_CHARACTERS = regex.compile(rf"[{UNSPACED}]\p{{M}}*|{_SPACED_WORD}")
_IS_UNSPACED = regex.compile(rf"[{UNSPACED}]")
_SENTENCE = regex.compile(r".*?(?:[.!?…]+[\"'”’»)\]]*(?=\s|$)|[。！？]+[」』”）]*|$)")


@dataclass(frozen=True)
class Sentence:
    """One sentence where it stands in its document."""

    document: str
    start: int
    end: int

    @property
    def text(self) -> str:
        """The sentence, without white space around it."""
        return self.document[self.start : self.end]

    @cached_property
    def words(self) -> list[tuple[int, int]]:
        """Start and end of each word, as offsets into the document."""
        pattern = _WITH_SCRIPT_RUNS if _KANA.search(self.text) else _WITH_CHARACTERS
        return [match.span() for match in pattern.finditer(self.document, self.start, self.end)]

    def word(self, number: int) -> str:
        """Word `number`."""
        start, end = self.words[number]
        return self.document[start:end]

    def leading(self, number: int) -> str | None:
        """What joins a word to what is before it: a space, or nothing where its script has none.

        None where it is joined by anything else: at the start of a sentence, after a bracket or a hyphen.
        """
        start, _ = self.words[number]
        if start > self.start and self.document[start - 1] == " ":
            return " "
        follows = number > 0 and self.words[number - 1][1] == start
        return "" if follows and _IS_UNSPACED.match(self.document, start) else None


def sentences(documents: Iterable[str]) -> Iterator[Sentence]:
    """Yield the sentences of documents, in order; a line end ends a sentence."""
    for document in documents:
        for line in regex.finditer(r"[^\n]+", document):
            for match in _SENTENCE.finditer(document, line.start(), line.end()):
                text = match.group()
                if text.strip():
                    start = match.start() + len(text) - len(text.lstrip())
                    yield Sentence(document, start, start + len(text.strip()))
