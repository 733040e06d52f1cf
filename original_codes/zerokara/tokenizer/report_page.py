"""The report as a page and as plain text, from the templates `report.html.jinja` and `report.txt.jinja`.

In: a `Report`. Out: the text of the file. The page is one HTML file that needs no network, no script and no other file.
Jinja2 escapes whatever comes from a corpus or a vocabulary; only the two charts, drawn from numbers, are markup.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from zerokara.progress import bytes_text, plural
from zerokara.tokenizer import report_charts as charts
from zerokara.tokenizer.model_file import SPACE_MARK
from zerokara.tokenizer.report import Report
from zerokara.tokenizer.report_measures import Measures

NUM_PIECE_COLOURS = 5
"""Colours that neighbouring pieces take in turn (.p0 to .p4 of the page)."""
_NUM_UNUSED_SHOWN = 50
_TOKEN_KINDS = (
    ("k-piece", "several characters", "piece_tokens"),
    ("k-character", "a single character", "character_tokens"),
    ("k-byte", "part of a character (bytes)", "byte_tokens"),
    ("k-unknown", "unknown", "unknown_tokens"),
    ("k-line", "line end", "line_end_tokens"),
)
"""Class on the page, name, and field of `Measures`."""
_RATIOS = {
    "chars/token": "characters_per_token",
    "bytes/token": "bytes_per_token",
    "tokens/word": "tokens_per_word",
}
_SHARES = {
    "single chars": "single_character_rate",
    "byte fallback": "byte_fallback_rate",
    "unknown": "unknown_rate",
    "unknown text": "unknown_character_rate",
}
"""Columns of the text, and the keys of `Measures.rates`."""
_SPACES = {" ": "·", "\t": "→", "\u3000": "□", "\u00a0": "⍽"}
"""The mark drawn over a space to make it visible; the space itself stays, to break lines at and to copy."""


def page(report: Report) -> str:
    """The report as one HTML page."""
    tokens = report.usage_tokens or 1
    pieces = sum(each.pieces for each in report.piece_lengths) or 1
    lengths = [(each.characters, each.pieces / pieces, each.tokens / tokens) for each in report.piece_lengths]
    step = max(1, len(report.unused_pieces) // _NUM_UNUSED_SHOWN)
    measures = [(source.source, name, m) for source in report.sources for name, m in source.tokenizers.items()]
    return _template("report.html.jinja").render(
        report=report,
        largest=max((m.rates()["bytes_per_token"] for _, _, m in measures), default=0),
        changed=[each for each in measures if each[2].failure_examples],
        token_kinds=_TOKEN_KINDS,
        num_series=charts.SERIES_COLOURS,
        num_piece_colours=NUM_PIECE_COLOURS,
        piece_length_chart=Markup(charts.piece_lengths(lengths)),
        coverage_chart=Markup(charts.coverage(list(report.coverage.values()))) if any(report.coverage.values()) else "",
        frequent=[(piece, f"{count:,}", f"{count / tokens:.2%}") for piece, count in report.most_frequent],
        longest=[(piece, len(piece), f"{count:,}") for piece, count in report.longest],
        unused=[(piece, len(piece)) for piece in report.unused_pieces[::step][:_NUM_UNUSED_SHOWN]],
    )


def text(report: Report) -> str:
    """The report as plain text."""
    return _template("report.txt.jinja").render(report=report, table=_table)


def _template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "bytes": bytes_text,
        "count": "{:,}".format,
        "fixed": lambda value: "n/a" if value is None else f"{value:.3f}",
        "percent": lambda share, digits: f"{share:.{digits}%}",
        "segments": segments,
        "language": language,
        "spelt": spelt,
        "repr": repr,
        "shown": lambda piece: piece if piece.isprintable() else repr(piece),
    }
    environment.globals["plural"] = plural
    return environment.get_template(name)


def _table(measures: dict[str, Measures], labels: dict[str, str]) -> str:
    """The measures of each tokenizer in aligned columns."""
    rows: list[tuple[str, ...]] = [("tokenizer", "tokens", *_RATIOS, *_SHARES, "lines changed")]
    for name, m in measures.items():
        rates = m.rates()
        ratios = ["n/a" if rates[key] is None else f"{rates[key]:.4f}" for key in _RATIOS.values()]
        shares = [f"{rates[key]:.4%}" for key in _SHARES.values()]
        rows.append((labels[name], f"{m.tokens:,}", *ratios, *shares, f"{m.round_trip_failures:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join(["", name.ljust(widths[0]), *aligned]))
    return "\n".join(lines)


def segments(text: str) -> Iterator[tuple[str, str, str]]:
    """Runs of printable text, and each space and unprintable character by itself: kind, what is shown, and its mark."""
    run = ""
    for character in text.replace(SPACE_MARK, " "):
        if character.isprintable() and character not in _SPACES:
            run += character
            continue
        if run:
            yield "text", run, ""
            run = ""
        is_space = character in _SPACES
        yield ("space", character, _SPACES[character]) if is_space else ("control", spelt(character), "")
    if run:
        yield "text", run, ""


def spelt(text: str) -> str:
    """`text` with what does not print as an escape of Python."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def language(text: str) -> str:
    """The language whose glyphs are meant, where the script tells (Han alone does not); else empty."""
    if any("\u3040" <= character <= "\u30ff" for character in text):
        return "ja"
    return "ko" if any("\uac00" <= character <= "\ud7a3" for character in text) else ""
