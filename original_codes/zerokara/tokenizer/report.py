"""Quality of a tokenizer in numbers, for each source of text and beside other tokenizers.

In: the tokenizer's file, texts of each source (held out from the training where a source has enough), the
sample that it was trained on, and the names of other tokenizers. Out: a `Report`, as values and as JSON. It compares
only what was measured on the same text: between texts bytes per token differ by more than between tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from zerokara.progress import Progress
from zerokara.tokenizer import report_measures as measuring
from zerokara.tokenizer.hugging_face import IN_FOLDER
from zerokara.tokenizer.morphemes import Analyser
from zerokara.tokenizer.report_measures import Counts, Measures
from zerokara.tokenizer.report_tokenizers import MeasuredTokenizer, open_tokenizer
from zerokara.tokenizer.sampling import SourceTexts

NUM_LISTED = 50
OURS = "this one"
HELD_OUT = "held-out text"
_MAX_EXAMPLES = 4
"""Lines shown of a source, fewer where there are many sources and tokenizers."""
_EXAMPLES_IN_ALL = 40
_EQUAL = 0.005
"""Relative difference in tokens below which two tokenizers count as equal."""


@dataclass(frozen=True)
class SourceReport:
    """The measures of every tokenizer on the text of one source, by name."""

    source: str
    measured_on: str
    """`HELD_OUT`, or `text offered to the training`."""
    tokenizers: dict[str, Measures]
    examples: list[dict[str, Any]]
    """Lines of the text, each a `line` with its cells by each of the `tokenizers`."""


@dataclass(frozen=True)
class Report:
    """Measures of a tokenizer and of those beside it, by their names, ours first."""

    vocab_size: int
    tokenizers: dict[str, dict[str, Any]]
    """`description` and `vocab_size` of each."""
    sources: list[SourceReport]
    all_sources: dict[str, Measures]
    usage_bytes: int
    """Text over which the use of our pieces was counted."""
    usage_tokens: int
    """Tokens in this text, line ends left out."""
    num_learnt_pieces: int
    """Pieces that the training found, single characters included: not control, byte and user-defined ones."""
    unused_pieces: list[str]
    """Learnt pieces that this text never used."""
    most_frequent: list[tuple[str, int]]
    """Pieces with the number of times that each was used; likewise the longest."""
    longest: list[tuple[str, int]]
    piece_lengths: list[dict[str, int]]
    """The `pieces` of the vocabulary and the `tokens` of this text, for each number of `characters`."""
    coverage: dict[str, list[dict[str, float]]]
    """Shares of the text (in bytes) and of the tokens of all sources that the most frequent `pieces` make up."""
    sample: dict[str, Any]
    """Facts of the training sample (`SampleReport`), with the memory that the training took."""
    word: str
    """Definition of a word in tokens per word, for display."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with the rates of all measures and the verdict."""
        values = asdict(self) | {"num_unused_pieces": len(self.unused_pieces), "verdict": self.verdict}
        measured = [self.all_sources, *(source.tokenizers for source in self.sources)]
        as_values = [values["all_sources"], *(source["tokenizers"] for source in values["sources"])]
        for measures, shown in zip(measured, as_values, strict=True):
            for name, one in measures.items():
                shown[name] |= one.rates()
        return values

    @cached_property
    def labels(self) -> dict[str, str]:
        """Short names of the tokenizers and the sources, by their names."""
        return _labels(list(self.tokenizers)) | _labels([source.source for source in self.sources])

    @property
    def groups(self) -> list[tuple[str, str, str, dict[str, Measures]]]:
        """The groups of the table: label, text measured on, source and measures; several sources also together."""
        groups = [(self.labels[one.source], one.measured_on, one.source, one.tokenizers) for one in self.sources]
        return [*groups, ("all sources", "together", "", self.all_sources)] if groups[1:] else groups

    @cached_property
    def verdict(self) -> str:
        """A few sentences that compare the compression with that of the other tokenizers."""
        ours = self.all_sources[OURS]
        if not ours.tokens:
            return "There was no text to measure on."
        others = {name: measures for name, measures in self.all_sources.items() if name != OURS}
        if not others:
            return (
                f"{_amounts(ours)}. No other tokenizer was measured: to compare with well-known ones, name some in "
                "compare_with (such as hf://openai-community/gpt2, downloaded before) and run step 1 again with --redo."
            )
        lossless = sorted((name for name in others if others[name].is_lossless), key=lambda name: others[name].tokens)
        sentences = [f"{_amounts(ours)}."]
        if lossless:
            compared = []
            for name in lossless:
                more = ours.tokens / others[name].tokens - 1
                amount = f"{abs(more):.0%} {'more' if more > 0 else 'fewer'} tokens than"
                amount = "as many tokens as" if abs(more) < _EQUAL else amount
                size = f"{self.tokenizers[name]['vocab_size']:,} pieces, {_amounts(others[name])}"
                compared.append(f"{amount} {self.labels[name]} ({size})")
            *first, last = compared
            sentences.append(f"For the same text it needs {', '.join(first)}{' and ' if first else ''}{last}.")
        better = sum(others[name].tokens < ours.tokens for name in lossless)
        if not ours.is_lossless:
            share = ours.rates()["round_trip_failure_rate"]
            sentences.append(f"It changes {share:.0%} of the lines itself, which saves tokens.")
        elif better:
            verb = f"compress{'es' * (better == 1)}"
            sentences.append(f"{better} of the {len(lossless)} others that give the text back exactly {verb} better.")
        elif lossless:
            sentences.append("No other tokenizer here that gives the text back exactly compresses better.")
        if lossy := [name for name in others if name not in lossless]:
            rates = ((name, others[name].rates()["round_trip_failure_rate"]) for name in lossy)
            shares = ", ".join(f"{self.labels[name]} ({share:.0%})" for name, share in rates)
            sentences.append(f"Not comparable, because lines do not decode to what they were: {shares}.")
        if lossless and any(source.measured_on != HELD_OUT for source in self.sources):
            sentences.append("Some of this text was offered to its own training, which flatters it.")
        return " ".join(sentences)

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the step's summary: one for each source and tokenizer."""
        rows = []
        for source in self.sources:
            label = self.labels[source.source]
            for name, one in source.tokenizers.items():
                row = f"{label} · {self.labels[name]}" if source.tokenizers.keys() - {OURS} else label
                rates = one.rates()
                per_word = f"{one.tokens_per_word:.3f} tokens/word" if one.words else "tokens/word n/a"
                per_token = f"{rates['characters_per_token']:.3f} characters/token, {rates['bytes_per_token']:.3f}"
                kinds = f"unknown {rates['unknown_rate']:.3%}, byte fallback {rates['byte_fallback_rate']:.3%}"
                changed = f"{one.round_trip_failures:,} of {one.lines:,} lines changed"
                rows.append((row, f"{per_token} bytes/token, {per_word}, {kinds}, {changed}"))
        return rows


def make(
    model_path: Path,
    sources: Sequence[str],
    texts: Sequence[SourceTexts],
    sentences: Path,
    sample: dict[str, Any],
    compare_with: Sequence[str] = (),
    analyser: Analyser | None = None,
) -> Report:
    """Measure the tokenizer at `model_path`, and those beside it; `analyser` finds the words of unspaced texts.

    Raises:
        UserError: a tokenizer to compare with cannot be opened.
    """
    word = "what white space separates"
    if analyser and analyser.language == "ja":
        word += f", and in Japanese text a morpheme as {analyser.version_text()} finds them"
    ours = open_tokenizer(model_path)
    tokenizers = {OURS: ours, **{name: open_tokenizer(name) for name in compare_with}}
    used = {name: np.zeros(len(tokenizer.pieces), dtype=np.int64) for name, tokenizer in tokenizers.items()}
    usage, usage_bytes = np.zeros_like(used[OURS]), 0
    num_examples = max(1, min(_MAX_EXAMPLES, _EXAMPLES_IN_ALL // max(len(sources) * len(tokenizers), 1)))
    reports = []
    text_bytes = sum(len(text.encode()) for body in texts for text in body.texts)
    sample_bytes = min(sentences.stat().st_size, measuring.MAX_USAGE_BYTES)
    with Progress("measuring", total=text_bytes * len(tokenizers) + sample_bytes, unit="B") as progress:
        for source, body in zip(sources, texts, strict=True):
            measures, words = {}, measuring.count_words(body.texts, analyser)
            for name, each in tokenizers.items():
                measures[name], counts = measuring.measure(each, body.texts, progress)
                measures[name].words = words
                used[name] += counts
                if body.held_out and name == OURS:  # Else the sample holds this text, and counts it.
                    usage += counts
                    usage_bytes += measures[name].bytes
            measured_on = HELD_OUT if body.held_out else "text offered to the training"
            examples = [
                {"line": line, "tokenizers": {n: measuring.cells(each, line) for n, each in tokenizers.items()}}
                for line in measuring.example_lines(body.texts, num_examples)
            ]
            reports.append(SourceReport(source, measured_on, measures, examples))
        usage_bytes += measuring.count_sample(ours, sentences, usage, progress)
    return Report(
        vocab_size=ours.vocab_size,
        tokenizers={
            n: {"description": each.description, "vocab_size": each.vocab_size} for n, each in tokenizers.items()
        },
        sources=reports,
        all_sources={name: measuring.total([report.tokenizers[name] for report in reports]) for name in tokenizers},
        usage_bytes=usage_bytes,
        usage_tokens=int(usage.sum()),
        **_of_pieces(ours, usage),
        coverage={name: measuring.coverage(each, used[name]) for name, each in tokenizers.items()},
        sample=sample,
        word=word,
    )


def _of_pieces(ours: MeasuredTokenizer, usage: Counts) -> dict[str, Any]:
    """Return the fields of the report about our own pieces."""
    counts, pieces, learnt = usage.tolist(), ours.pieces, ours.learnt
    by_count = sorted(range(len(counts)), key=lambda i: (-counts[i], i))
    by_length = sorted(learnt, key=lambda i: (-len(pieces[i]), i))
    vocabulary = np.bincount(ours.piece_characters).tolist()
    tokens = np.bincount(ours.piece_characters, weights=usage).astype(np.int64).tolist()
    return {
        "num_learnt_pieces": len(learnt),
        "unused_pieces": [pieces[i] for i in learnt if not counts[i]],
        "most_frequent": [(pieces[i], counts[i]) for i in by_count[:NUM_LISTED] if counts[i]],
        "longest": [(pieces[i], counts[i]) for i in by_length[:NUM_LISTED]],
        "piece_lengths": [
            {"characters": n, "pieces": vocabulary[n], "tokens": tokens[n]} for n in range(1, len(vocabulary))
        ],
    }


def _amounts(measures: Measures) -> str:
    per_word = f", {measures.tokens_per_word:.2f} tokens per word" if measures.words else ""
    return f"{measures.rates()['bytes_per_token']:.3f} bytes per token{per_word}"


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Shorten each path to its last part where that is unique; a tokenizer's usual file to the name of its folder."""
    paths = map(PurePosixPath, names)
    short = [(path.parent.name if path.name in IN_FOLDER else path.name) or str(path) for path in paths]
    return {name: last if short.count(last) == 1 else name for name, last in zip(names, short, strict=True)}
