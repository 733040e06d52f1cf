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
from zerokara.tokenizer.morphemes import Analyser
from zerokara.tokenizer.report_tokenizers import MeasuredTokenizer, TokenKind

Counts = npt.NDArray[np.int64]
"""int64[ids of a tokenizer]: the number of times each was used."""

MAX_USAGE_BYTES = 32_000_000
"""Text of the sample on which the use of the pieces is counted, in about a second."""
EXAMPLE_CHARACTERS = 180
"""Longest line shown."""
LOSSLESS_SHARE = 0.01
"""Share of lines that do not decode exactly up to which a tokenizer counts as lossless."""
MAX_UNSPACED_SHARE = 0.1
"""Share of the characters in scripts without spaces up to which white space is taken to separate words; names and
quotations of another language are found everywhere."""
_KANA = regex.compile(r"[\p{Hiragana}\p{Katakana}]")
_UNSPACED = regex.compile(r"[\p{Hiragana}\p{Katakana}\p{Han}\p{Thai}\p{Lao}\p{Tibetan}\p{Myanmar}\p{Khmer}]")
_BATCH_LINES = 4096
_MAX_FAILURES_SHOWN = 5


@dataclass
class Measures:
    """Counts of one tokenizer on one body of text.

    Tokens include line ends, and are counted by kind; one unknown token may hide a whole word (`unknown_characters`).
    `words` is that of `count_words`, and a round-trip failure is a line that decodes to another text.
    """

    characters: int = 0
    bytes: int = 0
    lines: int = 0
    tokens: int = 0
    piece_tokens: int = 0
    character_tokens: int = 0
    byte_tokens: int = 0
    unknown_tokens: int = 0
    line_end_tokens: int = 0
    unknown_characters: int = 0
    round_trip_failures: int = 0
    words: int | None = None
    failure_examples: list[str] = field(default_factory=list)

    @property
    def tokens_per_word(self) -> float | None:
        """Fertility: tokens of the lines (line ends left out) per word; None without words."""
        return (self.tokens - self.line_end_tokens) / self.words if self.words else None

    @property
    def is_lossless(self) -> bool:
        """True if nearly all lines decode exactly: dropping spaces or capitals is an easy way to few tokens."""
        return self.round_trip_failures <= LOSSLESS_SHARE * self.lines

    def rates(self) -> dict[str, Any]:
        """Return what compares: bytes and characters per token, tokens per word, shares of tokens or lines."""
        tokens = max(self.tokens, 1)
        return {
            "tokens_per_word": self.tokens_per_word,
            "characters_per_token": self.characters / tokens,
            "bytes_per_token": self.bytes / tokens,
            "unknown_rate": self.unknown_tokens / tokens,
            "unknown_character_rate": self.unknown_characters / max(self.characters, 1),
            "byte_fallback_rate": self.byte_tokens / tokens,
            "single_character_rate": self.character_tokens / tokens,
            "round_trip_failure_rate": self.round_trip_failures / max(self.lines, 1),
        }


@dataclass(frozen=True)
class Cell:
    """A stretch of a line and the tokens that spell it: one, or all bytes of a character."""

    text: str
    pieces: list[str]
    kind: str
    """`piece`, `character`, `byte`, `unknown`, or `dropped`: text without a token, such as a space."""


def measure(
    tokenizer: MeasuredTokenizer, texts: Sequence[str], progress: Progress | None = None
) -> tuple[Measures, Counts]:
    """Measure a tokenizer on texts; return the uses of each id too, and advance the progress by bytes."""
    lines = [line for text in texts for line in text.split("\n")]
    line_ends, num_bytes = len(lines) - len(texts), sum(len(line.encode()) for line in lines)
    ids = tokenizer.encode(lines)
    tokens = np.concatenate([np.zeros(0, dtype=np.int32), *ids])
    counts = np.bincount(tokens, minlength=len(tokenizer.pieces))
    by_kind = np.bincount(tokenizer.kinds, weights=counts, minlength=len(TokenKind)).astype(np.int64).tolist()
    changed = [line for line, decoded in zip(lines, tokenizer.decode(ids), strict=True) if decoded != line]
    unknown_characters = 0
    line_of_token = np.repeat(np.arange(len(lines)), np.array([len(each) for each in ids], dtype=np.int64))
    for i in np.unique(line_of_token[tokenizer.kinds[tokens] == TokenKind.UNKNOWN]).tolist():
        under = [range(start, end) for token, start, end in tokenizer.spans(lines[i]) if token in tokenizer.unknown_ids]
        unknown_characters += len(set().union(*under))
    if progress is not None:
        progress.advance(num_bytes)
    return Measures(
        characters=sum(map(len, lines)) + line_ends,
        bytes=num_bytes + line_ends,
        lines=len(lines),
        tokens=len(tokens) + line_ends,
        piece_tokens=by_kind[TokenKind.PIECE],
        character_tokens=by_kind[TokenKind.CHARACTER],
        byte_tokens=by_kind[TokenKind.BYTE],
        unknown_tokens=by_kind[TokenKind.UNKNOWN],
        line_end_tokens=line_ends,
        unknown_characters=unknown_characters,
        round_trip_failures=len(changed),
        failure_examples=[line[:100] for line in changed[:_MAX_FAILURES_SHOWN]],
    ), counts


def count_sample(tokenizer: MeasuredTokenizer, sentences: Path, used: Counts, progress: Progress) -> int:
    """Add the uses of each id to `used`, over evenly spaced lines of a large file; return the bytes of these lines."""
    step = max(1, math.ceil(sentences.stat().st_size / MAX_USAGE_BYTES))
    total = 0
    with open(sentences, encoding="utf-8", newline="\n") as file:
        chosen = islice(file, 0, None, step)
        while batch := [line.removesuffix("\n") for line in islice(chosen, _BATCH_LINES)]:
            used += np.bincount(np.concatenate(tokenizer.encode(batch)), minlength=len(used))
            bytes_read = sum(len(line.encode()) for line in batch)
            total += bytes_read
            progress.advance(bytes_read)
    return total


def total(measures: Sequence[Measures]) -> Measures:
    """Add up the measures of several bodies of text; without words where one body has none."""
    summed = Measures(words=0 if all(one.words is not None for one in measures) else None)
    for one in measures:
        for name in (each.name for each in fields(Measures) if getattr(summed, each.name) is not None):
            setattr(summed, name, getattr(summed, name) + getattr(one, name))
    summed.failure_examples = summed.failure_examples[:_MAX_FAILURES_SHOWN]
    return summed


def count_words(texts: Sequence[str], analyser: Analyser | None = None) -> int | None:
    """Number of words in the texts; None where they cannot be told apart.

    A word is what white space separates, punctuation included, as in papers that publish fertilities. Text in scripts
    that are written without spaces counts only where an analyser finds its morphemes (`pre_segment`).
    """
    whole = "\n".join(texts)
    words, unspaced = whole.split(), len(_UNSPACED.findall(whole))
    if unspaced <= MAX_UNSPACED_SHARE * sum(map(len, words)):
        return len(words)
    if analyser is None or analyser.language != "ja" or len(_KANA.findall(whole)) < MAX_UNSPACED_SHARE * unspaced:
        return None
    analyse = analyser.start()
    return sum(sum(1 for _ in analyse(line)) for line in whole.split("\n") if line.strip())


def coverage(tokenizer: MeasuredTokenizer, used: Counts) -> list[dict[str, float]]:
    """Coverage of the 1, 2, 5, 10, 20, 50, … most frequent pieces, up to all that were used."""
    order = np.argsort(-used, kind="stable")[: np.count_nonzero(used)]
    tokens, text = np.cumsum(used[order]), np.cumsum(used[order] * tokenizer.piece_bytes[order])
    if not len(order) or not text[-1]:
        return []
    text_share, token_share = (text / text[-1]).tolist(), (tokens / tokens[-1]).tolist()
    steps = (base * 10**power for power in range(len(str(len(order)))) for base in (1, 2, 5))
    numbers = [*(step for step in steps if step < len(order)), len(order)]
    return [{"pieces": n, "share_of_text": text_share[n - 1], "share_of_tokens": token_share[n - 1]} for n in numbers]


def example_lines(texts: Sequence[str], number: int) -> list[str]:
    """Choose a few lines of running text, evenly spread, none longer than `EXAMPLE_CHARACTERS`."""
    lines = list(dict.fromkeys(line.strip() for text in texts for line in text.split("\n")))
    worded = [line for line in lines if sum(map(str.isalpha, line)) > len(line) / 2]
    whole = [line for line in worded if EXAMPLE_CHARACTERS / 4 <= len(line) <= EXAMPLE_CHARACTERS]
    candidates = whole if len(whole) >= number else worded or [line for line in lines if line]
    number = min(number, len(candidates))
    chosen = []
    for i in range(number):
        line = candidates[(2 * i + 1) * len(candidates) // (2 * number)]
        head = line[:EXAMPLE_CHARACTERS]
        has_space = " " in head[EXAMPLE_CHARACTERS // 2 :]
        chosen.append(head.rsplit(" ", 1)[0] if head != line and has_space else head)
    return chosen


def cells(tokenizer: MeasuredTokenizer, line: str) -> list[Cell]:
    """Split a line as the tokenizer does; the texts join to the line again."""
    groups: list[tuple[int, int, list[int]]] = []
    for token, start, end in tokenizer.spans(line):
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
            kinds = {TokenKind(tokenizer.kinds[i]).name.lower() for i in ids}
            worst = next(kind for kind in ("unknown", "byte", "piece", "character") if kind in kinds)
            row.append(Cell(line[start:end], [tokenizer.pieces[i] for i in ids], worst))
        done = end
    return row
