"""The report as a page to look at: one HTML file that needs no network, no script and no other file.

In: a `Report`. Out: the page's text. What comes from a corpus or a vocabulary passes through `report_markup`, which
escapes it. Sections in their order: the numbers that count, the table beside other tokenizers, real lines in coloured
pieces, what the tokens are, the drawings, the pieces, how all this was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerokara.progress import bytes_text
from zerokara.tokenizer import report_charts as charts
from zerokara.tokenizer.encoder import SPACE_MARK
from zerokara.tokenizer.report import Report
from zerokara.tokenizer.report_markup import Markup, element, join
from zerokara.tokenizer.report_measures import Cell, Measures
from zerokara.tokenizer.report_style import PIECE_COLOURS, STYLE

_NUM_UNUSED_SHOWN = 50
_LOSSLESS = 0.01
"""Share of changed lines up to which a tokenizer may be called the best."""
_KINDS: tuple[tuple[str, str, Callable[[Measures], int]], ...] = (
    ("k-piece", "several characters", lambda m: m.piece_tokens),
    ("k-character", "a single character", lambda m: m.character_tokens),
    ("k-byte", "part of a character (bytes)", lambda m: m.byte_tokens),
    ("k-unknown", "unknown", lambda m: m.unknown_tokens),
    ("k-line", "line end", lambda m: m.line_end_tokens),
)
_SPACES = {" ": "·", "\t": "→", "\u3000": "□", "\u00a0": "⍽"}
"""What is drawn over a space to make it seen; the space itself stays, to break lines at and to copy."""


_JOINED = "\u2060"
"""Keeps what stands behind it on the same line."""


def page(report: Report) -> str:
    """The report as one page that needs nothing else."""
    names, sources = report.tokenizer_labels, report.source_labels
    sections = [
        _head(report),
        _headline(report, names, sources),
        _compression(report, names, sources),
        _examples(report, names, sources),
        _kinds(report, names, sources),
        _drawings(report, names),
        _pieces(report),
        _changed(report, names, sources),
        _notes(report, names),
    ]
    title = f"Tokenizer of {report.vocab_size:,} pieces"
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(STYLE)),
    ]
    body = [element("h1", title), *sections]
    whole = element("html", element("head", head), element("body", element("main", body)), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def _head(report: Report) -> Markup:
    """The line under the title, and the numbers that count."""
    ours = next(iter(report.tokenizers.values()))
    num_sources = len(report.sources)
    said = f"{ours.description} · measured on {num_sources} source{'' if num_sources == 1 else 's'}"
    if (used := report.sample.get("bytes_used")) is not None:
        said += f" · trained on {bytes_text(used)}"
    m = next(iter(report.all_sources.values()))
    rates, failures = m.rates(), m.round_trip_failures
    learnt = max(report.num_learnt_pieces, 1)
    tiles = [
        ("bytes a token", f"{rates['bytes_per_token']:.3f}", "more is shorter text for the model", ""),
        ("characters a token", f"{rates['characters_per_token']:.3f}", "of Unicode", ""),
        ("unknown", f"{rates['unknown_rate']:.3%}", "of the tokens", "bad" if m.unknown_tokens else "good"),
        ("byte fallback", f"{rates['byte_fallback_rate']:.3%}", "of the tokens", ""),
        ("lines changed", f"{failures:,}", f"of {m.lines:,}, there and back", "bad" if failures else "good"),
        (
            "pieces not used",
            f"{len(report.unused_pieces):,}",
            f"{len(report.unused_pieces) / learnt:.2%} of those learnt",
            "",
        ),
    ]
    made = []
    for name, value, note, class_ in tiles:
        number = element("dd", value, element("small", note) if note else "", class_=class_ or None)
        made.append(element("div", element("dt", name), number, class_="tile"))
    return join([element("p", said, class_="soft"), element("dl", made, class_="tiles")])


def _headline(report: Report, names: dict[str, str], sources: dict[str, str]) -> Markup:
    """The table: each source, each tokenizer."""
    heads = ("bytes / token", "chars / token", "unknown", "unknown text", "byte fallback", "lines changed", "tokens")
    groups = [(sources[each.source], each.measured_on, each.source, each.measures) for each in report.sources]
    if len(groups) > 1:
        groups.append(("all sources", "together", "", report.all_sources))
    bodies = []
    for name, measured_on, title, measures in groups:
        one = next(iter(measures.values()))
        facts = f" {measured_on}, {bytes_text(one.bytes)}, {one.lines:,} lines"
        shown = element("div", name, element("span", facts, class_="note"), class_="group", title=title or None)
        heading = element("tr", element("th", shown, colspan=len(heads) + 1, scope="rowgroup"))
        fewest = min((m.tokens for m in measures.values() if _gives_back(m)), default=-1)
        rows = [
            _row(names[each], place, m, best=len(measures) > 1 and _gives_back(m) and m.tokens == fewest)
            for place, (each, m) in enumerate(measures.items())
        ]
        bodies.append(element("tbody", heading, rows))
    header = element("thead", element("tr", element("th", "tokenizer"), [element("th", text) for text in heads]))
    descriptions = [
        element("li", element("strong", names[name]), f": {one.description}, {one.vocab_size:,} pieces", title=name)
        for name, one in report.tokenizers.items()
    ]
    return join(
        [
            element("h2", "In numbers"),
            element("div", element("table", header, bodies), class_="wide"),
            element("ul", descriptions, class_="note"),
        ]
    )


def _gives_back(m: Measures) -> bool:
    """Whether a tokenizer gives back nearly all text: to drop spaces or capitals is an easy way to few tokens."""
    return m.round_trip_failures <= m.lines * _LOSSLESS


def _row(name: str, place: int, m: Measures, *, best: bool) -> Markup:
    rates = m.rates()
    ratios = (f"{rates['bytes_per_token']:.3f}", f"{rates['characters_per_token']:.3f}")
    chosen = "best" if best else None
    return element(
        "tr",
        element("td", charts.swatch(f"s{charts.series(place)}"), name),
        [element("td", ratio, class_=chosen) for ratio in ratios],
        element("td", f"{rates['unknown_rate']:.3%}", class_="bad" if m.unknown_tokens else None),
        element("td", f"{rates['unknown_character_rate']:.3%}", class_="bad" if m.unknown_tokens else None),
        element("td", f"{rates['byte_fallback_rate']:.3%}"),
        element("td", f"{m.round_trip_failures:,}", class_="bad" if m.round_trip_failures else None),
        element("td", f"{m.tokens:,}", class_=chosen),
    )


def _compression(report: Report, names: dict[str, str], sources: dict[str, str]) -> Markup:
    """Bars of bytes a token."""
    largest = max((m.rates()["bytes_per_token"] for one in report.sources for m in one.measures.values()), default=0)
    rows: list[Markup] = []
    for source in report.sources:
        alone = len(source.measures) == 1
        rows += [] if alone else [element("h3", sources[source.source])]
        for place, (name, m) in enumerate(source.measures.items()):
            value = m.rates()["bytes_per_token"]
            rows.append(element("div", sources[source.source] if alone else names[name], class_="name"))
            rows.append(charts.bar(value, largest, f"{value:.3f}", f"s{charts.series(place)}"))
    if not rows:
        return Markup("")
    note = "Bytes a token. Longer is better: the same text takes fewer tokens, so the model sees more of it at a time."
    return join([element("h2", "Compression"), element("p", note, class_="note"), element("div", rows, class_="bars")])


def _examples(report: Report, names: dict[str, str], sources: dict[str, str]) -> Markup:
    """Lines of each source in coloured pieces."""
    parts: list[Markup] = []
    for source in report.sources:
        parts += [element("h3", sources[source.source])] if source.examples else []
        for example in source.examples:
            cuts = []
            for name, cells in example.cells.items():
                tokens = sum(len(cell.pieces) for cell in cells)
                who = element("div", element("strong", names[name]), element("span", f"{tokens} tokens"), class_="who")
                cuts.append(element("div", who, _line(cells), class_="cut"))
            parts.append(element("div", cuts, class_="example"))
    if not parts:
        return Markup("")
    note = [
        "Each colour is a token, and ",
        element("span", _visible(" "), class_="p0"),
        " is a space. A small number counts the tokens that share a character, an orange line marks bytes, a red frame "
        "text that the tokenizer does not know, and faint text without colour is text that no token stands for.",
    ]
    return join([element("h2", "How it reads"), element("p", note, class_="note"), parts])


def _line(cells: Sequence[Cell]) -> Markup:
    spans, colour = [], 0
    for cell in cells:
        if cell.kind == "dropped":
            spans.append(element("span", _visible(cell.text), class_="dropped"))
            continue
        number = element("sup", f"{_JOINED}{len(cell.pieces)}") if len(cell.pieces) > 1 else ""
        marked = f" {cell.kind}" if cell.kind in ("byte", "unknown") else ""
        class_ = f"p{colour % PIECE_COLOURS}{marked}"
        spans.append(element("span", _visible(cell.text), number, class_=class_, title=" ".join(cell.pieces)))
        colour += 1
    text = "".join(cell.text for cell in cells)
    return element("div", spans, class_="line", dir="auto", lang=_language(text))


def _kinds(report: Report, names: dict[str, str], sources: dict[str, str]) -> Markup:
    """What the tokens of each source are, as shares."""
    rows: list[Markup] = []
    for source in report.sources:
        alone = len(source.measures) == 1
        rows += [] if alone else [element("h3", sources[source.source])]
        for name, m in source.measures.items():
            rows.append(element("div", sources[source.source] if alone else names[name], class_="name"))
            rows.append(charts.stack([(class_, kind, number(m)) for class_, kind, number in _KINDS]))
    if not rows:
        return Markup("")
    legend = charts.legend([(class_, kind) for class_, kind, _ in _KINDS])
    return join([element("h2", "What the tokens are"), legend, element("div", rows, class_="bars")])


def _drawings(report: Report, names: dict[str, str]) -> Markup:
    """The lengths of the pieces, and how much the most frequent ones cover."""
    pieces, tokens = sum(each.pieces for each in report.piece_lengths) or 1, report.usage_tokens or 1
    pairs = [(str(each.characters), each.pieces / pieces, each.tokens / tokens) for each in report.piece_lengths]
    lengths = [
        element("h2", "Length of the pieces"),
        element("figcaption", "How many characters a piece has: in the vocabulary, and as the text uses them."),
        charts.legend([("k-piece", "share of the vocabulary"), ("k-byte", "share of the tokens")]),
        charts.columns(pairs, "characters in the piece", "Histogram of the lengths of the pieces"),
    ]
    drawn = {name: points for name, points in report.coverage.items() if points}
    legend = [(f"s{charts.series(i)}", names[name]) for i, name in enumerate(report.coverage) if name in drawn]
    covered = [
        element("h2", "Coverage"),
        element("figcaption", "Share of the text that the most frequent pieces spell."),
        charts.legend(legend),
        charts.curves(report.coverage, "number of pieces, most frequent first", "Coverage of the text"),
    ]
    figures = [element("figure", lengths)] + ([element("figure", covered)] if drawn else [])
    return element("section", figures, class_="charts")


def _pieces(report: Report) -> Markup:
    """The most frequent, the longest and some unused pieces, as tables."""
    tokens = report.usage_tokens or 1
    frequent = [(piece, f"{count:,}", f"{count / tokens:.2%}") for piece, count in report.most_frequent]
    longest = [(piece, f"{len(piece)}", f"{count:,}") for piece, count in report.longest]
    step = max(1, len(report.unused_pieces) // _NUM_UNUSED_SHOWN)
    unused = [(piece, f"{len(piece)}") for piece in report.unused_pieces[::step][:_NUM_UNUSED_SHOWN]]
    lists = [
        _list(f"The {len(frequent)} most frequent", ("piece", "times", "share"), frequent),
        _list(f"The {len(longest)} longest", ("piece", "length", "times"), longest),
        _list(f"{len(unused)} of {len(report.unused_pieces):,} not used", ("piece", "length"), unused),
    ]
    note = (
        f"Counted over {bytes_text(report.usage_bytes)} of the text that the tokenizer was made from and measured on."
    )
    return join([element("h2", "Pieces"), element("p", note, class_="note"), element("div", lists, class_="lists")])


def _list(title: str, heads: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Markup:
    header = element("thead", element("tr", [element("th", head) for head in heads]))
    body = [
        element(
            "tr",
            element("td", element("span", _visible(piece), class_="piece", lang=_language(piece)), class_="left"),
            [element("td", number) for number in numbers],
        )
        for piece, *numbers in rows
    ]
    table = element("table", header, element("tbody", body)) if rows else element("p", "None.", class_="soft")
    return element("details", element("summary", title), table, open="")


def _changed(report: Report, names: dict[str, str], sources: dict[str, str]) -> Markup:
    """Some of the lines that do not come back as they were."""
    parts: list[Markup] = []
    for source in report.sources:
        for name, m in source.measures.items():
            if m.failure_examples:
                told = f"{sources[source.source]} · {names[name]}: {m.round_trip_failures:,} of {m.lines:,} lines"
                shown = [element("pre", _spelt(line)) for line in m.failure_examples]
                parts.append(element("details", element("summary", told), shown))
    return join([element("h2", "Lines that do not come back as they were"), parts]) if parts else Markup("")


def _notes(report: Report, names: dict[str, str]) -> Markup:
    """How all this was measured."""
    notes = [
        "Every tokenizer is measured alike: the text is cut into lines, each line is encoded by itself, nothing is "
        "added to it (no <s>, no [CLS]), and a line end counts as one token. A tokenizer with pieces that hold line "
        "ends would need a few tokens less on whole documents.",
        "Bytes are UTF-8 bytes of the text, characters are Unicode code points.",
        "Byte fallback counts tokens that are a part of a character: byte pieces such as <0xE3>, and, of a tokenizer "
        "over bytes, tokens that are no whole characters.",
        "A line is changed when encoding and decoding it does not give it back exactly.",
        "Unknown is a share of the tokens, unknown text a share of the characters: an unknown token stands for one "
        "character or for a whole word, as each tokenizer has it.",
    ]
    if len(report.tokenizers) > 1:
        notes.append("Green: the fewest tokens on a source, of the tokenizers that change at most 1% of its lines.")
        notes += [f"{names[name]} is {name}" for name in report.tokenizers if names[name] != name]
    notes += [f"{short} is {source}" for source, short in report.source_labels.items() if short != source]
    return join(
        [element("h2", "How this was measured"), element("ul", [element("li", note) for note in notes], class_="note")]
    )


def _visible(text: str) -> Markup:
    """Text whose spaces and unprintable characters can be seen."""
    parts: list[Markup] = []
    for character in text.replace(SPACE_MARK, " "):
        if character in _SPACES:
            parts.append(element("i", character, class_="space", data_mark=_SPACES[character]))
        elif character.isprintable():
            parts.append(join(character))
        else:
            parts.append(element("i", _spelt(character), class_="control"))
    return join(parts)


def _spelt(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _language(text: str) -> str | None:
    """The language whose shapes of characters are meant, where the script tells; Han alone does not."""
    if any("\u3040" <= character <= "\u30ff" for character in text):
        return "ja"
    return "ko" if any("\uac00" <= character <= "\ud7a3" for character in text) else None
