"""Measures of a tokenizer on text.

In: a tokenizer and texts. Out: sums and rates, the number of times each id was used, and lines split into their pieces.
Every tokenizer is measured alike: each line is encoded by itself, and a line end counts as one token. For a tokenizer
with pieces that hold line ends, such as "):\\n", that is a few tokens more than it would need on the whole text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import regex

from zerokara.progress import Progress
from zerokara.tokenizer.encoder import Encoder, Ids
from zerokara.tokenizer.model_file import SPACE_MARK

Counts = npt.NDArray[np.int64]
"""int64[ids of a tokenizer]: the number of times each was used."""

MAX_USAGE_BYTES = 32_000_000
"""Text of the sample on which the use of the pieces is counted, in some seconds."""
EXAMPLE_CHARACTERS = 180
"""Longest line shown."""
LOSSLESS_SHARE = 0.01
"""Share of lines that do not decode exactly up to which a tokenizer counts as lossless."""
MAX_UNSPACED_SHARE = 0.1
"""Share of the characters in scripts without spaces up to which white space is taken to separate words; names and
quotations of another language are found everywhere."""
_UNSPACED = regex.compile(r"[\p{Hiragana}\p{Katakana}\p{Han}\p{Thai}\p{Lao}\p{Tibetan}\p{Myanmar}\p{Khmer}]")
_BATCH_LINES = 4096
_MAX_FAILURES_SHOWN = 5


@dataclass
class Measures:
    """Counts of one tokenizer on one body of text.

    Tokens include line ends. Words are None where they cannot be told apart (`count_words`), and a round-trip failure
    is a line that decodes to another text.
    """

    characters: int = 0
    bytes: int = 0
    lines: int = 0
    words: int | None = None
    tokens: int = 0
    byte_tokens: int = 0
    unknown_tokens: int = 0
    line_end_tokens: int = 0
    round_trip_failures: int = 0
    failure_examples: list[str] = field(default_factory=list)

    @property
    def is_lossless(self) -> bool:
        """True if nearly all lines decode exactly: dropping spaces or capitals is an easy way to few tokens."""
        return self.round_trip_failures <= LOSSLESS_SHARE * self.lines

    def rates(self) -> dict[str, Any]:
        """Return what compares: bytes and characters per token, tokens per word (fertility), shares of tokens."""
        tokens = max(self.tokens, 1)
        return {
            "bytes_per_token": self.bytes / tokens,
            "characters_per_token": self.characters / tokens,
            "tokens_per_word": (self.tokens - self.line_end_tokens) / self.words if self.words else None,
            "unknown_rate": self.unknown_tokens / tokens,
            "byte_fallback_rate": self.byte_tokens / tokens,
            "round_trip_failure_rate": self.round_trip_failures / max(self.lines, 1),
        }


class MeasuredTokenizer:
    """A tokenizer, its pieces as they are shown, and the ids of parts of characters."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.pieces = encoder, list(encoder.pieces)
        self.byte_ids = set(encoder.byte_ids)
        """Ids of byte pieces; in byte-level BPE, of any piece whose bytes are no whole characters."""
        for i, content in enumerate(encoder.token_texts):
            text = content.decode(errors="ignore")
            if text.encode() != content:
                self.byte_ids.add(i)
            elif text and i not in self.byte_ids:
                self.pieces[i] = text.replace(" ", SPACE_MARK)

    def uses(self, ids: Sequence[Ids]) -> Counts:
        """Count the uses of each id."""
        return np.bincount(np.concatenate([np.zeros(0, dtype=np.int32), *ids]), minlength=len(self.pieces))


@dataclass(frozen=True)
class Cell:
    """A stretch of a line and the tokens that spell it: one, or all bytes of a character."""

    text: str
    pieces: list[str]
    kind: str
    """`piece`, `byte`, `unknown`, or `dropped`: text without a token, such as a space."""


def measure(tokenizer: MeasuredTokenizer, texts: Sequence[str]) -> Measures:
    """Measure a tokenizer on texts."""
    encoder, lines = tokenizer.encoder, [line for text in texts for line in text.split("\n")]
    ids = encoder.encode_many(lines)
    line_ends, counts = len(lines) - len(texts), tokenizer.uses(ids)
    changed = [line for line, decoded in zip(lines, map(encoder.decode, ids), strict=True) if decoded != line]
    return Measures(
        characters=sum(map(len, texts)),
        bytes=sum(len(text.encode()) for text in texts),
        lines=len(lines),
        words=count_words(texts),
        tokens=int(counts.sum()) + line_ends,
        byte_tokens=int(counts[sorted(tokenizer.byte_ids)].sum()),
        unknown_tokens=int(counts[encoder.unk_id]) if encoder.unk_id >= 0 else 0,
        line_end_tokens=line_ends,
        round_trip_failures=len(changed),
        failure_examples=[line[:100] for line in changed[:_MAX_FAILURES_SHOWN]],
    )


def count_sample(tokenizer: MeasuredTokenizer, sentences: Path, progress: Progress) -> tuple[Counts, int]:
    """Count the uses of each id over evenly spaced lines of a large file; return the bytes of these lines, too."""
    step = max(1, math.ceil(sentences.stat().st_size / MAX_USAGE_BYTES))
    used, num_bytes = tokenizer.uses([]), 0
    with open(sentences, encoding="utf-8", newline="\n") as file:
        chosen = islice(file, 0, None, step)
        while batch := [line.removesuffix("\n") for line in islice(chosen, _BATCH_LINES)]:
            used += tokenizer.uses(tokenizer.encoder.encode_many(batch))
            batch_bytes = sum(len(line.encode()) for line in batch)
            num_bytes += batch_bytes
            progress.advance(batch_bytes)
    return used, num_bytes


def total(measures: Sequence[Measures]) -> Measures:
    """Add up the measures of several bodies of text; without words where one body has none."""
    summed = Measures(words=0 if all(one.words is not None for one in measures) else None)
    for one in measures:
        for name in (each.name for each in fields(Measures) if getattr(summed, each.name) is not None):
            setattr(summed, name, getattr(summed, name) + getattr(one, name))
    summed.failure_examples = summed.failure_examples[:_MAX_FAILURES_SHOWN]
    return summed


def count_words(texts: Sequence[str]) -> int | None:
    """Number of words in the texts; None where much of them is in scripts that are written without spaces.

    A word is what white space separates, punctuation included, as in papers that publish fertilities.
    """
    words = [word for text in texts for word in text.split()]
    unspaced = sum(len(_UNSPACED.findall(text)) for text in texts)
    return len(words) if unspaced <= MAX_UNSPACED_SHARE * sum(map(len, words)) else None


def example_lines(texts: Sequence[str], number: int) -> list[str]:
    """Choose a few lines, evenly spread over those of middling length, else over all, cut at `EXAMPLE_CHARACTERS`."""
    lines = list(dict.fromkeys(line.strip() for text in texts for line in text.split("\n") if line.strip()))
    middling = [line for line in lines if EXAMPLE_CHARACTERS / 4 <= len(line) <= EXAMPLE_CHARACTERS]
    candidates = middling if len(middling) >= number else lines
    number = min(number, len(candidates))
    return [candidates[(2 * i + 1) * len(candidates) // (2 * number)][:EXAMPLE_CHARACTERS] for i in range(number)]


def cells(tokenizer: MeasuredTokenizer, line: str) -> list[Cell]:
    """Split a line as the tokenizer does; the texts join to the line again."""
    groups: list[tuple[int, int, list[int]]] = []
    for token, start, end in tokenizer.encoder.spans(line):
        ids = [token]
        # Tokens that share a character form one cell, and an empty token joins the next.
        if groups and (groups[-1][0] == groups[-1][1] or start < groups[-1][1]):
            start, end_before, before = groups.pop()
            end, ids = max(end_before, end), [*before, token]
        groups.append((start, end, ids))
    row, done = [], 0
    for start, end, ids in [*groups, (len(line), len(line), [])]:
        row += [Cell(line[done:start], [], "dropped")] if start > done else []
        if ids:
            is_bytes = not tokenizer.byte_ids.isdisjoint(ids)
            kind = "unknown" if tokenizer.encoder.unk_id in ids else "byte" if is_bytes else "piece"
            row.append(Cell(line[start:end], [tokenizer.pieces[i] for i in ids], kind))
        done = end
    return row
