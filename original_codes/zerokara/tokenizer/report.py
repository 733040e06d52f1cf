"""How good a tokenizer is, in numbers, a source at a time and beside other tokenizers.

In: `.model` files and texts of each source (held out from the training where a source can spare any).
Out: a `Report`, as JSON and as text to read. Every tokenizer is measured alike: text is cut into lines, each line is
encoded by itself, and a line end counts as one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from zerokara.errors import Fault, UserError
from zerokara.progress import Progress, bytes_text
from zerokara.tokenizer.encoder import SPACE_MARK
from zerokara.tokenizer.model_file import Kind, ModelFile
from zerokara.tokenizer.sampling import SourceTexts

NUM_LISTED = 50
MAX_USAGE_BYTES = 32_000_000
"""Text of the sample over which the use of the pieces is counted; two seconds' work."""
OURS = "this one"
_BATCH_LINES = 4096
_MAX_FAILURES_SHOWN = 5


@dataclass
class Measures:
    """What one tokenizer does to one body of text."""

    characters: int = 0
    bytes: int = 0
    lines: int = 0
    tokens: int = 0
    """Line ends included."""
    unknown_tokens: int = 0
    byte_tokens: int = 0
    """Tokens that are single bytes of a character without a piece."""
    round_trip_failures: int = 0
    """Lines that do not come back as they were."""
    failure_examples: list[str] = field(default_factory=list)

    def rates(self) -> dict[str, float]:
        """The numbers that compare: characters and bytes a token, and shares of the tokens."""
        tokens = max(self.tokens, 1)
        return {
            "characters_per_token": self.characters / tokens,
            "bytes_per_token": self.bytes / tokens,
            "unknown_rate": self.unknown_tokens / tokens,
            "byte_fallback_rate": self.byte_tokens / tokens,
            "round_trip_failure_rate": self.round_trip_failures / max(self.lines, 1),
        }


@dataclass(frozen=True)
class SourceReport:
    """The measures of every tokenizer on the text of one source."""

    source: str
    measured_on: str
    """`held-out text` or `text offered to the training`."""
    measures: dict[str, Measures]
    """By the name of the tokenizer, ours first."""


@dataclass(frozen=True)
class Report:
    """All that is known of a tokenizer."""

    vocab_size: int
    sources: list[SourceReport]
    usage_bytes: int
    """Text over which the use of the pieces was counted."""
    unused_pieces: list[str]
    """Learnt pieces that this text never used."""
    most_frequent: list[tuple[str, int]]
    longest: list[str]
    sample: dict[str, Any]
    """How the training sample came about."""

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values, rates included."""
        sources = [
            {
                "source": source.source,
                "measured_on": source.measured_on,
                "tokenizers": {name: {**asdict(m), **m.rates()} for name, m in source.measures.items()},
            }
            for source in self.sources
        ]
        return {**asdict(self), "num_unused_pieces": len(self.unused_pieces), "sources": sources}

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
                rows.append((f"{source.source} · {name}" if len(source.measures) > 1 else source.source, text))
        return rows

    def as_text(self) -> str:
        """The report to read."""
        lines = [f"Tokenizer of {self.vocab_size:,} pieces", ""]
        for source in self.sources:
            one = next(iter(source.measures.values()))
            lines += [f"{source.source} ({source.measured_on}, {bytes_text(one.bytes)}, {one.lines:,} lines)"]
            header = ("tokenizer", "tokens", "chars/token", "bytes/token", "unknown", "byte fallback", "lines changed")
            table = [header]
            for name, m in source.measures.items():
                r = m.rates()
                ratios = (f"{r['characters_per_token']:.4f}", f"{r['bytes_per_token']:.4f}")
                shares = (f"{r['unknown_rate']:.4%}", f"{r['byte_fallback_rate']:.4%}")
                table.append((name, f"{m.tokens:,}", *ratios, *shares, f"{m.round_trip_failures:,}"))
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            for name, *cells in table:
                aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
                lines.append("  ".join(["", name.ljust(widths[0]), *aligned]))
            lines += [f"    changed: {text!r}" for m in source.measures.values() for text in m.failure_examples]
            lines.append("")
        lines += [
            f"Pieces that {bytes_text(self.usage_bytes)} of this text never used: {len(self.unused_pieces):,}",
            "",
            f"The {len(self.most_frequent)} most frequent pieces",
            "  " + "  ".join(f"{_shown(piece)} {count:,}" for piece, count in self.most_frequent),
            "",
            f"The {len(self.longest)} longest pieces",
            "  " + "  ".join(_shown(piece) for piece in self.longest),
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

    Raises: UserError when a file to compare with is no SentencePiece model.
    """
    processors = {OURS: open_model(model_path), **{path: open_model(Path(path)) for path in compare_with}}
    model = ModelFile.read(model_path)
    counts = np.zeros(len(model.pieces), dtype=np.int64)
    reports, usage_bytes = [], 0
    with Progress("measuring", total=len(sources) * len(processors) + 1, unit="measure") as progress:
        for source, body in zip(sources, texts, strict=True):
            measures = {}
            for name, processor in processors.items():
                measures[name] = measure(processor, body.texts, counts if body.held_out and name == OURS else None)
                progress.advance(1)
            measured_on = "held-out text" if body.held_out else "text offered to the training"
            usage_bytes += measures[OURS].bytes if body.held_out else 0
            reports.append(SourceReport(source, measured_on, measures))
        usage_bytes += measure(processors[OURS], _sample_lines(sentences), counts).bytes
        progress.advance(1)
    learnt = [i for i, piece in enumerate(model.pieces) if piece.kind is Kind.NORMAL]
    by_count = sorted(range(len(counts)), key=lambda i: (-counts[i], i))
    by_length = sorted(learnt, key=lambda i: (-len(model.pieces[i].text), i))
    return Report(
        vocab_size=len(model.pieces),
        sources=reports,
        usage_bytes=usage_bytes,
        unused_pieces=[model.pieces[i].text for i in learnt if not counts[i]],
        most_frequent=[(model.pieces[i].text, int(counts[i])) for i in by_count[:NUM_LISTED] if counts[i]],
        longest=[model.pieces[i].text for i in by_length[:NUM_LISTED]],
        sample=sample,
    )


def open_model(path: Path) -> Any:
    """Open any SentencePiece model, also one that the training could not use.

    Raises: UserError when it is none.
    """
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(path.read_bytes())
    except (OSError, RuntimeError) as error:
        raise UserError(Fault(str(path), f"is not a SentencePiece model that can be read ({error})")) from error
    return processor


def measure(processor: Any, texts: Sequence[str] | Iterator[str], counts: npt.NDArray[np.int64] | None) -> Measures:
    """Measure one tokenizer on texts; adds the number of times that each piece was used to `counts`."""
    size = processor.GetPieceSize()
    used = np.zeros(size, dtype=np.int64)
    measures, num_texts = Measures(), 0
    lines = _lines(texts)
    while batch := list(islice(lines, _BATCH_LINES)):
        all_ids = processor.EncodeAsNumpy([line for line, _ in batch], num_threads=1)
        decoded = processor.Decode([ids.tolist() for ids in all_ids], num_threads=1)
        used += np.bincount(np.concatenate(all_ids), minlength=size)
        for (line, is_last), ids, back in zip(batch, all_ids, decoded, strict=True):
            num_texts += is_last
            measures.lines += 1
            measures.characters += len(line)
            measures.bytes += len(line.encode())
            measures.tokens += len(ids)
            if back != line:
                measures.round_trip_failures += 1
                if len(measures.failure_examples) < _MAX_FAILURES_SHOWN:
                    measures.failure_examples.append(line[:100])
    line_ends = measures.lines - num_texts
    measures.characters += line_ends
    measures.bytes += line_ends
    measures.tokens += line_ends
    measures.unknown_tokens = int(used[processor.unk_id()]) if processor.unk_id() >= 0 else 0
    measures.byte_tokens = int(sum(used[i] for i in range(size) if used[i] and processor.IsByte(i)))
    if counts is not None:
        counts += used
    return measures


def _lines(texts: Sequence[str] | Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Every line, and whether it is the last of its text."""
    for text in texts:
        lines = text.split("\n")
        for i, line in enumerate(lines):
            yield line, i + 1 == len(lines)


def _sample_lines(sentences: Path) -> Iterator[str]:
    """Lines of the sample, evenly spread over it where it is larger than `MAX_USAGE_BYTES`."""
    step = max(1, -(-sentences.stat().st_size // MAX_USAGE_BYTES))
    with open(sentences, encoding="utf-8", newline="\n") as file:
        for line in islice(file, 0, None, step):
            yield line[:-1]


def _shown(piece: str) -> str:
    """A piece that stays on its line."""
    return piece if piece.isprintable() else repr(piece.replace(SPACE_MARK, "▁"))
