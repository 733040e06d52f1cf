"""The page: whole, closed, without any reference outside, and with nothing in it that a corpus could run."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree.ElementTree import Element, fromstring

import pytest
from toy_tokenizers import TrainToy

from zerokara.tokenizer import report, report_page
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.sampling import SourceTexts

TAGS = set(
    re.findall(
        r"\w+",
        "html head meta title style body main h1 h2 h3 p dl dt dd div span small strong sup i ul li pre table "
        "thead tbody tr th td section figure figcaption details summary svg g text path",
    )
)
NASTY = ["<script>", "<b>&", '"onload="x', "</style>", "-->"]


def outline(page: str) -> Element:
    """Parse a page every element of which must be closed in turn, as if it were XML."""
    page = page.removeprefix("<!DOCTYPE html>\n").replace("<details open>", "<details>")
    return fromstring(re.sub(r"<((?:meta|br|col)\b[^>]*)>", r"<\1/>", page))


def text_of(page: str) -> str:
    return "".join(outline(page).find("body").itertext())  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def nasty(train_toy: TrainToy, tmp_path_factory: pytest.TempPathFactory) -> report.Report:
    """The report of a tokenizer whose pieces, text and sources are all markup."""
    model, sentences = train_toy(user_defined_symbols=tuple(NASTY)), tmp_path_factory.mktemp("nasty") / "sentences.txt"
    line = f"the fox {' '.join(NASTY)} and \u3000 \t the dogs 今日は 龘 running far, away from a house they never knew"
    sentences.write_text(line + "\n", encoding="utf-8")
    sources = [SourceTexts([line, f"{line} ▁ <i>changed</i>"], True), SourceTexts([], False)]
    names = ["data/<i>one</i>.jsonl", 'two" onclick="x.jsonl']
    return report.make(model, names, sources, sentences, {"bytes_used": 12_300_000}, [str(model)])


@pytest.fixture(scope="module")
def page(nasty: report.Report) -> str:
    return report_page.page(nasty)


def test_the_page_is_whole_and_needs_nothing_else_and_markup_in_pieces_is_text(page: str) -> None:
    elements = list(outline(page).iter())
    tags, attributes = (
        {each.tag.split("}")[-1] for each in elements},
        {name for each in elements for name in each.attrib},
    )
    assert tags <= TAGS, tags - TAGS
    assert not {name for name in attributes if name.startswith("on")} | (attributes & {"src", "href"})
    text = text_of(page)
    assert all(piece in text for piece in [*NASTY, "<i>one</i>.jsonl", 'two" onclick="x.jsonl', "<i>changed</i>"])
    assert page.startswith("<!DOCTYPE html>\n<html") and '<meta charset="utf-8">' in page
    assert not re.search(r"https?:|url\(|@import|<script|<link|<img|<iframe", page)
    assert "prefers-color-scheme: dark" in page and "@media print" in page and "width=device-width" in page


def test_the_page_says_what_the_report_says(nasty: report.Report, page: str) -> None:
    text = text_of(page)
    for m in (m for source in nasty.sources for m in source.tokenizers.values()):
        assert f"{m.rates()['bytes_per_token']:.3f}" in text and f"{m.tokens:,}" in text
    assert all(f"{count:,}" in text for _, count in nasty.most_frequent)
    assert f"{len(nasty.unused_pieces):,} not used" in text and "trained on 12.3 MB" in text
    assert "part of a character (bytes)" in text and "Coverage" in text


def test_lines_show_their_pieces_spaces_and_bytes(page: str) -> None:
    assert '<i class="space" data-mark="·"> </i>' in page
    assert '<i class="space" data-mark="□">\u3000</i>' in page and '<i class="space" data-mark="→">\t</i>' in page
    assert re.search(
        r'<span class="p\d byte" title="&lt;0xE9&gt; &lt;0xBE&gt; &lt;0x98&gt;">龘<sup>&#x2060;3</sup></span>', page
    )
    colours = re.findall(r'<span class="p(\d)[ "]', page.split('<div class="line"')[1])
    assert len(set(colours)) == 5 and all(a != b for a, b in pairwise(colours))
    assert 'lang="ja"' in page
    frequent = page.split("most frequent</summary>")[1]
    assert re.search(r'class="piece"><i class="space" data-mark="·"> </i>\w+</span>', frequent), "a space, no ▁"


def test_a_tokenizer_alone_needs_no_comparison(toy: Encoder, tmp_path: Path) -> None:
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("the fox\n", encoding="utf-8")
    made = report.make(toy.model_path, ["a/one.jsonl"], [SourceTexts(["the fox"], True)], sentences, {})
    page = report_page.page(made)
    outline(page)
    assert "all sources" not in page and 'class="best"' not in page and "Green" not in page


def test_curves_end_at_the_whole_text() -> None:
    points = [{"pieces": n, "share_of_text": share} for n, share in ((1, 0.1), (10, 0.5), (100, 1.0))]
    drawn = report_page.coverage_chart([points, []]) + report_page.length_chart([(1, 0.5, 0.9), (2, 0.5, 0.1)])
    colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", drawn))
    assert len(colours) == 6 and all(each == "none" or each.startswith("var(--") for each in colours), "of the page"
    (path,) = re.findall(r'id="coverage-0">\s*<path d="M([^"]+)"', drawn)
    (x0, y0), (x1, y1), (x2, y2) = (map(float, corner.split()) for corner in path.split("L"))
    assert x1 - x0 == pytest.approx(x2 - x1), "a decade is as wide as the next"
    assert (y0 - y1) / (y1 - y2) == pytest.approx(0.4 / 0.5, rel=0.01)
    outline(report_page.coverage_chart([[{"pieces": 1, "share_of_text": 1.0}]] * 7))
