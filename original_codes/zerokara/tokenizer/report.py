"""Quality of a tokenizer in numbers, for each source of text and beside other tokenizers, and as a page.

In: the tokenizer's file, texts of each source (held out from the training where a source has enough), the
sample that it was trained on, and the names of other tokenizers. Out: a `Report`, as JSON and as one HTML page
(`report.html.jinja`). It compares only what was measured on the same text: between texts bytes per token differ by more
than between tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerokara.errors import Fault, UserError
from zerokara.pages import template
from zerokara.progress import Progress, bytes_text
from zerokara.tokenizer import report_measures as measuring
from zerokara.tokenizer.hugging_face import IN_FOLDER, open_file, tokenizer_file
from zerokara.tokenizer.model_file import SPACE_MARK
from zerokara.tokenizer.report_measures import MeasuredTokenizer, Measures
from zerokara.tokenizer.sampling import SourceTexts

HUB_PREFIX = "hf://"
NUM_LISTED = 50
OURS = "this one"
HELD_OUT = "held-out text"
_MAX_EXAMPLES, _EXAMPLES_IN_ALL = 4, 40
"""Lines shown of a source, fewer where there are many sources and tokenizers."""
_MARKS = {" ": "·\u200b", SPACE_MARK: "·\u200b", "\t": "→\u200b", "\u3000": "□\u200b", "\u00a0": "⍽"}
"""Marks shown in place of spaces, with a place to break the line."""


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
    """Text of the sample over which the use of our pieces was counted."""
    num_learnt_pieces: int
    """Pieces that the training found, single characters included: not control, byte and user-defined ones."""
    unused_pieces: list[str]
    """Learnt pieces that this text never used."""
    most_frequent: list[tuple[str, int]]
    """Pieces with the number of times that each was used; likewise the longest."""
    longest: list[tuple[str, int]]
    sample: dict[str, Any]
    """Facts of the training sample (`SampleReport`), with the memory that the training took."""

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
    def verdict(self) -> str:
        """A few sentences that compare the compression with that of the other tokenizers."""
        ours = self.all_sources[OURS]
        if not ours.tokens:
            return "There was no text to measure on."
        sentences = [f"{ours.rates()['bytes_per_token']:.3f} bytes per token."]
        if len(self.all_sources) == 1:
            sentences.append(
                "No other tokenizer was measured: to compare with well-known ones, name some in compare_with (such as "
                "hf://openai-community/gpt2, downloaded before) and run step 1 again with --redo."
            )
        for name, one in self.all_sources.items():
            if not one.is_lossless:
                share = one.rates()["round_trip_failure_rate"]
                sentences.append(f"Not comparable: {name} changes {share:.0%} of the lines, which saves tokens.")
            elif name != OURS:
                more = ours.tokens / one.tokens - 1
                sentences.append(f"{abs(more):.1%} {'more' if more > 0 else 'fewer'} tokens than {name}.")
        if any(source.measured_on != HELD_OUT for source in self.sources):
            sentences.append("Some of this text was offered to its own training, which flatters it.")
        return " ".join(sentences)

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the step's summary: one for each source and tokenizer."""
        rows = []
        for source in self.sources:
            for name, one in source.tokenizers.items():
                rates = one.rates()
                per_word = f"{rates['tokens_per_word']:.3f} tokens/word" if one.words else "tokens/word n/a"
                per_token = f"{rates['characters_per_token']:.3f} characters/token, {rates['bytes_per_token']:.3f}"
                kinds = f"unknown {rates['unknown_rate']:.3%}, byte fallback {rates['byte_fallback_rate']:.3%}"
                changed = f"{one.round_trip_failures:,} of {one.lines:,} lines changed"
                row = source.source if name == OURS else f"{source.source} · {name}"
                rows.append((row, f"{per_token} bytes/token, {per_word}, {kinds}, {changed}"))
        return rows

    def page(self) -> str:
        """Render the report as one HTML page, in which Jinja2 escapes what comes from a corpus or a vocabulary."""
        groups = [(one.source, f"{one.measured_on}, ", one.tokenizers) for one in self.sources]
        return template(
            Path(__file__).with_name("report.html.jinja"),
            bytes=bytes_text,
            count="{:,}".format,
            fixed=lambda value: "n/a" if value is None else f"{value:.3f}",
            percent=lambda share: f"{share:.3%}",
            visible=_visible,
            language=_language,
        ).render(
            report=self,
            groups=[*groups, ("all sources", "", self.all_sources)] if len(groups) > 1 else groups,
            lists=[
                (f"The {len(self.most_frequent)} most frequent", self.most_frequent),
                (f"The {len(self.longest)} longest", self.longest),
                (
                    f"{len(self.unused_pieces):,} of {self.num_learnt_pieces:,} not used",
                    [(piece, 0) for piece in self.unused_pieces[:NUM_LISTED]],
                ),
            ],
            changed=[
                (f"{one.source} · {name}: {m.round_trip_failures:,} of {m.lines:,} lines", m.failure_examples)
                for one in self.sources
                for name, m in one.tokenizers.items()
                if m.failure_examples
            ],
        )


def find_file(name: str) -> Path:
    """Return the file of a tokenizer: `name` itself, or the one in that folder or downloaded repository.

    Raises:
        UserError: there is none.
    """
    if not name.startswith(HUB_PREFIX):
        return tokenizer_file(Path(name))
    from huggingface_hub import try_to_load_from_cache  # a second to import

    repository = name.removeprefix(HUB_PREFIX)
    with suppress(ValueError):  # no name of a repository
        for inside in IN_FOLDER:
            if isinstance(cached := try_to_load_from_cache(repository, inside), str):
                return Path(cached)
    rule = "is not on this machine, and step 1 downloads no tokenizer"
    raise UserError(Fault(name, rule, remedy=f"run `hf download {repository} tokenizer.json` first"))


def make(
    model_path: Path,
    sources: Sequence[str],
    texts: Sequence[SourceTexts],
    sentences: Path,
    sample: dict[str, Any],
    compare_with: Sequence[str] = (),
) -> Report:
    """Measure the tokenizer at `model_path`, and those beside it.

    Raises:
        UserError: a tokenizer to compare with cannot be opened.
    """
    paths = {OURS: model_path, **{name: find_file(name) for name in compare_with}}
    tokenizers = {name: MeasuredTokenizer(open_file(path)) for name, path in paths.items()}
    ours = tokenizers[OURS]
    num_examples = max(1, min(_MAX_EXAMPLES, _EXAMPLES_IN_ALL // max(len(sources) * len(tokenizers), 1)))
    reports = []
    text_bytes = sum(len(text.encode()) for body in texts for text in body.texts)
    sample_bytes = min(sentences.stat().st_size, measuring.MAX_USAGE_BYTES)
    with Progress("measuring", total=text_bytes * len(tokenizers) + sample_bytes, unit="B") as progress:
        for source, body in zip(sources, texts, strict=True):
            measures = {}
            for name, each in tokenizers.items():
                measures[name] = measuring.measure(each, body.texts)
                progress.advance(measures[name].bytes)
            measured_on = HELD_OUT if body.held_out else "text offered to the training"
            examples = [
                {"line": line, "tokenizers": {n: measuring.cells(each, line) for n, each in tokenizers.items()}}
                for line in measuring.example_lines(body.texts, num_examples)
            ]
            reports.append(SourceReport(source, measured_on, measures, examples))
        used, usage_bytes = measuring.count_sample(ours, sentences, progress)
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
        all_sources={name: measuring.total([report.tokenizers[name] for report in reports]) for name in tokenizers},
        usage_bytes=usage_bytes,
        num_learnt_pieces=len(learnt),
        unused_pieces=[ours.pieces[i] for i in learnt if not counts[i]],
        most_frequent=[(ours.pieces[i], counts[i]) for i in by_count[:NUM_LISTED] if counts[i]],
        longest=[(ours.pieces[i], counts[i]) for i in by_length[:NUM_LISTED]],
        sample=sample,
    )


def _visible(text: str) -> str:
    """Show spaces by marks, and each unprintable character by Python's escape."""
    return "".join(_MARKS.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)


def _language(text: str) -> str:
    """Language whose glyphs are meant, where the script decides it (Han alone does not); else empty."""
    if any("\u3040" <= character <= "\u30ff" for character in text):
        return "ja"
    return "ko" if any("\uac00" <= character <= "\ud7a3" for character in text) else ""
