"""How good a tokenizer is, in numbers, a source at a time and beside other tokenizers.

In: the tokenizer's `.model` file, texts of each source (held out from the training where a source can spare any), the
sample that it was trained on, and the names of other tokenizers. Out: a `Report`, as JSON and as text; `report_page`
makes a page of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from zerokara.progress import Progress, bytes_text
from zerokara.tokenizer import report_measures as measuring
from zerokara.tokenizer.model_file import ModelFile, PieceType
from zerokara.tokenizer.report_measures import Cell, Counts, Coverage, Measures
from zerokara.tokenizer.report_tokenizers import IN_FOLDER, MeasuredTokenizer, open_tokenizer
from zerokara.tokenizer.sampling import SourceTexts

NUM_LISTED = 50
OURS = "this one"
_MAX_EXAMPLES = 4
"""Lines of a source to look at, fewer where there are many sources and tokenizers."""
_EXAMPLES_IN_ALL = 40
_PLAIN = ("vocab_size", "usage_bytes", "usage_tokens", "num_learnt_pieces", "sample")
"""Fields of a report that are JSON values as they are."""


@dataclass(frozen=True)
class Example:
    """A line of the text as every tokenizer cuts it."""

    line: str
    cells: dict[str, list[Cell]]
    """By the name of the tokenizer."""

    def as_json(self) -> dict[str, Any]:
        """The example as JSON values."""
        cut = {name: [cell._asdict() for cell in cells] for name, cells in self.cells.items()}
        return {"line": self.line, "tokenizers": cut}


@dataclass(frozen=True)
class SourceReport:
    """The measures of every tokenizer on the text of one source."""

    source: str
    measured_on: str
    """`held-out text` or `text offered to the training`."""
    measures: dict[str, Measures]
    """By the name of the tokenizer, ours first."""
    examples: list[Example] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The measures with their rates, and the examples, as JSON values."""
        return {
            "source": self.source,
            "measured_on": self.measured_on,
            "tokenizers": {name: measures.as_json() for name, measures in self.measures.items()},
            "examples": [example.as_json() for example in self.examples],
        }


class Described(NamedTuple):
    """What is known of a tokenizer without any text."""

    description: str
    vocab_size: int


class PieceLength(NamedTuple):
    """The pieces of one length."""

    characters: int
    pieces: int
    """Pieces of this many characters in the vocabulary."""
    tokens: int
    """Tokens that were such pieces, in the text over which the use was counted."""


@dataclass(frozen=True)
class Report:
    """All that is known of a tokenizer."""

    vocab_size: int
    tokenizers: dict[str, Described]
    """Ours and those beside it, by name."""
    sources: list[SourceReport]
    all_sources: dict[str, Measures]
    """The sums over the sources, by the name of the tokenizer."""
    usage_bytes: int
    """Text over which the use of the pieces was counted."""
    usage_tokens: int
    """Tokens of ours that this text takes, line ends left out."""
    num_learnt_pieces: int
    """Pieces that the training found, single characters included: not control, byte and user-defined ones."""
    unused_pieces: list[str]
    """Learnt pieces that this text never used."""
    most_frequent: list[tuple[str, int]]
    """With the number of times that each was used."""
    longest: list[tuple[str, int]]
    """Likewise."""
    piece_lengths: list[PieceLength]
    coverage: dict[str, list[Coverage]]
    """By the name of the tokenizer, on the text of all sources."""
    sample: dict[str, Any]
    """How the training sample came about."""

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values, rates included."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "tokenizers": {name: one._asdict() for name, one in self.tokenizers.items()},
            "sources": [source.as_json() for source in self.sources],
            "all_sources": {name: measures.as_json() for name, measures in self.all_sources.items()},
            "num_unused_pieces": len(self.unused_pieces),
            "unused_pieces": self.unused_pieces,
            "most_frequent": self.most_frequent,
            "longest": self.longest,
            "piece_lengths": [length._asdict() for length in self.piece_lengths],
            "coverage": {name: [point._asdict() for point in points] for name, points in self.coverage.items()},
        }

    @cached_property
    def tokenizer_labels(self) -> dict[str, str]:
        """Short names of the tokenizers, by their names."""
        return _labels(list(self.tokenizers))

    @cached_property
    def source_labels(self) -> dict[str, str]:
        """Short names of the sources, by their names."""
        return _labels([source.source for source in self.sources])

    def rows(self) -> list[tuple[str, str]]:
        """The short table: a line a source and tokenizer."""
        rows = []
        for source in self.sources:
            for name, m in source.measures.items():
                rates = m.rates()
                text = (
                    f"{rates['characters_per_token']:.3f} characters/token, "
                    f"{rates['bytes_per_token']:.3f} bytes/token, "
                    f"unknown {rates['unknown_rate']:.3%}, byte fallback {rates['byte_fallback_rate']:.3%}, "
                    f"{m.round_trip_failures} of {m.lines:,} lines changed"
                )
                label = self.source_labels[source.source]
                rows.append((f"{label} · {self.tokenizer_labels[name]}" if len(source.measures) > 1 else label, text))
        return rows

    def as_text(self) -> str:
        """The report to read."""
        lines = [f"Tokenizer of {self.vocab_size:,} pieces", ""]
        for name, one in self.tokenizers.items():
            label = self.tokenizer_labels[name]
            place = "" if label == name else f", {name}"
            lines.append(f"  {label}: {one.description}, {one.vocab_size:,} pieces{place}")
        lines.append("")
        for source in self.sources:
            lines += [*_table(f"{source.source} ({source.measured_on}", source.measures, self.tokenizer_labels), ""]
        if len(self.sources) > 1:
            lines += [*_table("all sources (together", self.all_sources, self.tokenizer_labels), ""]
        for name, points in self.coverage.items():
            lines += (
                [f"Share of the text covered by the most frequent pieces of {self.tokenizer_labels[name]}"]
                if points
                else []
            )
            lines += [f"  {point.pieces:>9,}  {point.share_of_text:.4%}" for point in points]
            lines += [""] if points else []
        lines += [
            f"Pieces that {bytes_text(self.usage_bytes)} of this text never used: "
            f"{len(self.unused_pieces):,} of {self.num_learnt_pieces:,} learnt",
            "",
            f"The {len(self.most_frequent)} most frequent pieces",
            "  " + "  ".join(f"{_shown(piece)} {count:,}" for piece, count in self.most_frequent),
            "",
            f"The {len(self.longest)} longest pieces",
            "  " + "  ".join(_shown(piece) for piece, _ in self.longest),
            "",
        ]
        return "\n".join(lines)


def make(
    model_path: Path,
    sources: Sequence[str],
    texts: Sequence[SourceTexts],
    sentences: Path,
    sample: dict[str, Any],
    compare_with: Sequence[str] = (),
) -> Report:
    """Measure the tokenizer at `model_path` and those to compare it with on the texts of each source.

    Raises: UserError when there is no tokenizer to be read where one to compare with is said to be.
    """
    tokenizers = {OURS: open_tokenizer(model_path), **{name: open_tokenizer(name) for name in compare_with}}
    ours = tokenizers[OURS]
    used = {name: np.zeros(len(tokenizer.pieces), dtype=np.int64) for name, tokenizer in tokenizers.items()}
    usage, usage_bytes = np.zeros_like(used[OURS]), 0
    num_examples = max(1, min(_MAX_EXAMPLES, _EXAMPLES_IN_ALL // max(len(sources) * len(tokenizers), 1)))
    reports = []
    text_bytes = sum(len(text.encode()) for body in texts for text in body.texts)
    work = text_bytes * len(tokenizers) + measuring.sample_bytes(sentences)
    with Progress("measuring", total=work, unit="B") as progress:
        for source, body in zip(sources, texts, strict=True):
            before = used[OURS].copy()
            measures = {n: measuring.measure(each, body.texts, used[n], progress) for n, each in tokenizers.items()}
            if body.held_out:  # else the sample holds this text, and counts it
                usage += used[OURS] - before
                usage_bytes += measures[OURS].bytes
            measured_on = "held-out text" if body.held_out else "text offered to the training"
            lines = measuring.example_lines(body.texts, num_examples)
            examples = [
                Example(line, {n: measuring.cells(each, line) for n, each in tokenizers.items()}) for line in lines
            ]
            reports.append(SourceReport(source, measured_on, measures, examples))
        usage_bytes += measuring.count_sample(ours, sentences, usage, progress)
    return Report(
        vocab_size=ours.vocab_size,
        tokenizers={name: Described(each.description, each.vocab_size) for name, each in tokenizers.items()},
        sources=reports,
        all_sources={name: measuring.total([report.measures[name] for report in reports]) for name in tokenizers},
        usage_bytes=usage_bytes,
        usage_tokens=int(usage.sum()),
        **_of_pieces(ours, ModelFile.read(model_path), usage),
        coverage={name: measuring.coverage(each, used[name]) for name, each in tokenizers.items()},
        sample=sample,
    )


def open_model(name: str | Path) -> MeasuredTokenizer:
    """Open a tokenizer to compare with: a SentencePiece model, a `tokenizer.json`, or a folder that holds one.

    Raises: UserError when it is none.
    """
    return open_tokenizer(name)


def _of_pieces(ours: MeasuredTokenizer, model: ModelFile, usage: Counts) -> dict[str, Any]:
    """The fields of the report that speak of our own pieces."""
    counts, pieces = usage.tolist(), ours.pieces
    learnt = [i for i, piece in enumerate(model.pieces) if piece.type is PieceType.NORMAL]
    by_count = sorted(range(len(counts)), key=lambda i: (-counts[i], i))
    by_length = sorted(learnt, key=lambda i: (-len(pieces[i]), i))
    vocabulary = np.bincount(ours.piece_characters).tolist()
    tokens = np.bincount(ours.piece_characters, weights=usage).astype(np.int64).tolist()
    return {
        "num_learnt_pieces": len(learnt),
        "unused_pieces": [pieces[i] for i in learnt if not counts[i]],
        "most_frequent": [(pieces[i], counts[i]) for i in by_count[:NUM_LISTED] if counts[i]],
        "longest": [(pieces[i], counts[i]) for i in by_length[:NUM_LISTED]],
        "piece_lengths": [PieceLength(n, vocabulary[n], tokens[n]) for n in range(1, len(vocabulary))],
    }


def _table(title: str, measures: dict[str, Measures], labels: dict[str, str]) -> list[str]:
    """The lines of one table: a row a tokenizer; the title lacks its closing bracket."""
    one = next(iter(measures.values()))
    lines = [f"{title}, {bytes_text(one.bytes)}, {one.lines:,} lines)"]
    ratios, shares = ("chars/token", "bytes/token"), ("single chars", "byte fallback", "unknown", "unknown text")
    table: list[tuple[str, ...]] = [("tokenizer", "tokens", *ratios, *shares, "lines changed")]
    for name, m in measures.items():
        r = m.rates()
        numbers = (f"{r['characters_per_token']:.4f}", f"{r['bytes_per_token']:.4f}")
        rates = [r[f"{each}_rate"] for each in ("single_character", "byte_fallback", "unknown", "unknown_character")]
        table.append(
            (labels[name], f"{m.tokens:,}", *numbers, *(f"{x:.4%}" for x in rates), f"{m.round_trip_failures:,}")
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, *cells in table:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join(["", name.ljust(widths[0]), *aligned]))
    return lines + [
        f"    changed by {labels[name]}: {text!r}" for name, m in measures.items() for text in m.failure_examples
    ]


def _labels(names: Sequence[str]) -> dict[str, str]:
    """The last part of each path, where that tells them apart; of a tokenizer's usual file its folder's name."""
    short = [_last_part(name) for name in names]
    return {name: last if short.count(last) == 1 else name for name, last in zip(names, short, strict=True)}


def _last_part(name: str) -> str:
    path = PurePosixPath(name)
    return path.parent.name or name if path.name in IN_FOLDER else path.name or name


def _shown(piece: str) -> str:
    """A piece that stays on its line."""
    return piece if piece.isprintable() else repr(piece)
