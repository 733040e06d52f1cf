"""Quality of a tokenizer in numbers, for each source of text and beside other tokenizers, and as a page.

In: the tokenizer's file, texts of each source (held out from the training where a source has enough), the
sample that it was trained on, and the names of other tokenizers. Out: a `Report`, as JSON and as one HTML page
(`report.html.jinja`). It compares only what was measured on the same text: between texts bytes per token differ by more
than between tokenizers.

Every tokenizer is measured alike: each line is encoded by itself, and a line end counts as one token. For a tokenizer
with pieces that hold line ends, such as "):\\n", that is a few tokens more than it would need on the whole text.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zerokara.base.pages import template
from zerokara.base.progress import Progress, bytes_text
from zerokara.tokenizer.encoder import Encoder, Ids
from zerokara.tokenizer.hugging_face import open_file, tokenizer_file
from zerokara.tokenizer.model_file import SPACE_MARK
from zerokara.tokenizer.sampling import SourceTexts

Counts = npt.NDArray[np.int64]
"""int64[ids of a tokenizer]: the number of times each was used."""

MAX_USAGE_BYTES = 32_000_000
"""Text of the sample on which the use of the pieces is counted, in some seconds."""
EXAMPLE_CHARACTERS = 180
"""Longest line shown."""
_BATCH_LINES = 4096
_MAX_FAILURES_SHOWN = 5
NUM_LISTED = 50
OURS = "this one"
_MAX_EXAMPLES, _EXAMPLES_IN_ALL = 4, 40
"""Lines shown of a source, fewer where there are many sources and tokenizers."""
_MARKS = {" ": "·\u200b", SPACE_MARK: "·\u200b", "\t": "→\u200b", "\u3000": "□\u200b", "\u00a0": "⍽"}
_MARKS |= {"\u200b": "¦\u200b", "\u200c": "⁞\u200c", "\u200d": "\u200d"}  # they shape what stands beside them
"""Marks shown in place of spaces, with a place to break the line."""


@dataclass
class Measures:
    """Counts of one tokenizer on one body of text.

    Tokens include line ends. A round-trip failure is a line that decodes to another text.
    """

    characters: int = 0
    bytes: int = 0
    lines: int = 0
    tokens: int = 0
    byte_tokens: int = 0
    unknown_tokens: int = 0
    round_trip_failures: int = 0
    failure_examples: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return the counts, and what compares: bytes and characters per token, shares of tokens and of lines."""
        tokens = max(self.tokens, 1)
        return asdict(self) | {
            "bytes_per_token": self.bytes / tokens,
            "characters_per_token": self.characters / tokens,
            "unknown_rate": self.unknown_tokens / tokens,
            "byte_fallback_rate": self.byte_tokens / tokens,
            "round_trip_failure_rate": self.round_trip_failures / max(self.lines, 1),
        }

    def __add__(self, other: "Measures") -> "Measures":
        return Measures(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class MeasuredTokenizer:
    """A tokenizer, its pieces as they are shown, and the ids of parts of characters."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.pieces, self.byte_ids = encoder, list(encoder.pieces), set[int]()
        """`byte_ids`: of byte pieces (<0x41>), and in byte-level BPE of all pieces that are no whole characters."""
        for i, content in enumerate(encoder.token_texts):
            text = content.decode(errors="ignore")
            if text.encode() != content or (len(content) == 1 and self.pieces[i].startswith("<0x")):
                self.byte_ids.add(i)
            elif text:
                self.pieces[i] = text.replace(" ", SPACE_MARK)

    def uses(self, ids: Sequence[Ids]) -> Counts:
        return np.bincount(np.concatenate([np.zeros(0, dtype=np.int32), *ids]), minlength=len(self.pieces))


@dataclass(frozen=True)
class Cell:
    """A stretch of a line and the tokens that spell it: one, or all bytes of a character."""

    text: str
    pieces: list[str]
    kind: str
    """`piece`, `byte`, `unknown`, or `dropped`: text without a token, such as a space."""


def measure(tokenizer: MeasuredTokenizer, texts: Sequence[str]) -> Measures:
    encoder, lines = tokenizer.encoder, [line for text in texts for line in text.split("\n")]
    ids = encoder.encode_many(lines)
    counts = tokenizer.uses(ids)
    changed = [line for line, decoded in zip(lines, map(encoder.decode, ids), strict=True) if decoded != line]
    return Measures(
        characters=sum(map(len, texts)),
        bytes=sum(len(text.encode()) for text in texts),
        lines=len(lines),
        tokens=int(counts.sum()) + len(lines) - len(texts),
        byte_tokens=int(counts[sorted(tokenizer.byte_ids)].sum()),
        unknown_tokens=int(counts[encoder.unk_id]) if encoder.unk_id >= 0 else 0,
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


@dataclass(frozen=True)
class Report:
    """Measures of a tokenizer and of those beside it, by their names, ours first."""

    vocab_size: int
    tokenizers: dict[str, dict[str, Any]]
    """`description` and `vocab_size` of each."""
    sources: list[dict[str, Any]]
    """Of each its name (`source`), the text it was `measured_on` (held out, or offered to the training), the
    `Measures.facts` of each of the `tokenizers`, and `examples`: lines of the text, each a `line` with its cells by
    each of the `tokenizers`."""
    all_sources: dict[str, dict[str, Any]]
    usage_bytes: int
    """Text of the sample over which the use of our pieces was counted."""
    num_learnt_pieces: int
    """Pieces that the training found, single characters included: not control, byte and user-defined ones."""
    unused_pieces: list[str]
    """Learnt pieces that this text never used."""
    most_frequent: list[tuple[str, int]]
    """Pieces with the number of times that each was used; likewise the longest."""
    longest: list[tuple[str, int]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"num_unused_pieces": len(self.unused_pieces)}

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the step's summary: one for each source and tokenizer."""
        rows = []
        for source in self.sources:
            for name, one in source["tokenizers"].items():
                per_token = f"{one['characters_per_token']:.3f} characters/token, {one['bytes_per_token']:.3f}"
                kinds = f"unknown {one['unknown_rate']:.3%}, byte fallback {one['byte_fallback_rate']:.3%}"
                changed = f"{one['round_trip_failures']:,} of {one['lines']:,} lines changed"
                row = source["source"] if name == OURS else f"{source['source']} · {name}"
                rows.append((row, f"{per_token} bytes/token, {kinds}, {changed}"))
        return rows

    def page(self) -> str:
        """Render the report as one HTML page, in which Jinja2 escapes what comes from a corpus or a vocabulary."""
        return template(
            Path(__file__).with_name("report.html.jinja"),
            bytes=bytes_text,
            count="{:,}".format,
            fixed="{:.3f}".format,
            percent="{:.3%}".format,
            visible=_visible,
        ).render(report=self, num_listed=NUM_LISTED)


def make(
    model_path: Path,
    sources: Sequence[str],
    texts: Sequence[SourceTexts],
    sentences: Path,
    compare_with: Sequence[str] = (),
) -> Report:
    """Measure the tokenizer at `model_path`, and those beside it.

    Raises:
        UserError: a tokenizer to compare with cannot be opened.
    """
    paths = {OURS: model_path, **{name: tokenizer_file(Path(name)) for name in compare_with}}
    tokenizers = {name: MeasuredTokenizer(open_file(path)) for name, path in paths.items()}
    ours = tokenizers[OURS]
    num_examples = max(1, min(_MAX_EXAMPLES, _EXAMPLES_IN_ALL // max(len(sources) * len(tokenizers), 1)))
    reports, all_sources = list[dict[str, Any]](), {name: Measures() for name in tokenizers}
    text_bytes = sum(len(text.encode()) for body in texts for text in body.texts)
    sample_bytes = min(sentences.stat().st_size, MAX_USAGE_BYTES)
    with Progress("measuring", total=text_bytes * len(tokenizers) + sample_bytes, unit="B") as progress:
        for source, body in zip(sources, texts, strict=True):
            measures = {}
            for name, each in tokenizers.items():
                measured = measure(each, body.texts)
                measures[name], all_sources[name] = measured.facts(), all_sources[name] + measured
                progress.advance(measured.bytes)
            examples = [
                {"line": line, "tokenizers": {n: cells(each, line) for n, each in tokenizers.items()}}
                for line in example_lines(body.texts, num_examples)
            ]
            measured_on = "held-out text" if body.held_out else "text offered to the training"
            facts = {"source": source, "measured_on": measured_on, "tokenizers": measures, "examples": examples}
            reports.append(facts)
        used, usage_bytes = count_sample(ours, sentences, progress)
    counts, learnt = used.tolist(), ours.encoder.learnt_ids
    by_count = sorted(range(len(counts)), key=lambda i: (-counts[i], i))
    by_length = sorted(learnt, key=lambda i: (-len(ours.pieces[i]), i))
    return Report(
        vocab_size=ours.encoder.vocab_size,
        tokenizers={
            name: {"description": each.encoder.description, "vocab_size": each.encoder.vocab_size}
            for name, each in tokenizers.items()
        },
        sources=reports,
        all_sources={name: measured.facts() for name, measured in all_sources.items()},
        usage_bytes=usage_bytes,
        num_learnt_pieces=len(learnt),
        unused_pieces=[ours.pieces[i] for i in learnt if not counts[i]],
        most_frequent=[(ours.pieces[i], counts[i]) for i in by_count[:NUM_LISTED] if counts[i]],
        longest=[(ours.pieces[i], counts[i]) for i in by_length[:NUM_LISTED]],
    )


def _visible(text: str) -> str:
    """Show spaces by marks, and each unprintable character by Python's escape."""
    return "".join(_MARKS.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)
