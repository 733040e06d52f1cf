"""Texts of others in Markdown, read back by a parser with HTML and tables on."""

from itertools import pairwise

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from zerokara.base import progress
from zerokara.publishing import card

NASTY = [
    "x](javascript:alert(1))<script>alert(1)</script>.jsonl", "![a](http://tracker/p.png)", "[a]: http://x",
    "a|b\\|c\\", "`a` ``b``", "**a** __b__ ~~c~~ $d$", "&lt;b&gt; &#60;", "<http://x> www.x.org http://x a@b.c",
    "# a", "- a", "1. a", "---", "=====", "> a", "    a", "```", "~~~", "<!-- a",
]  # fmt: skip


def tokens(text: str) -> list[Token]:
    parser = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return [each for token in parser.parse(text) for each in (token, *(token.children or []))]


def shown(text: str) -> str:
    return "".join(token.content for token in tokens(text) if token.type in ("text", "text_special"))


PLAIN = {"paragraph_open", "paragraph_close", "inline", "text", "text_special"}


@pytest.mark.parametrize("text", NASTY)
def test_a_text_in_a_line_is_text(text: str) -> None:
    for given in (text, f"x {text} y"):
        made = card.inline(given)
        assert {token.type for token in tokens(made)} <= PLAIN, made
        assert shown(made) == " ".join(given.split())


def test_a_text_in_a_table_is_one_cell() -> None:
    rows = [f"| {card.inline(each)} | 1 |" for each in NASTY]
    found = tokens("\n".join(["| a | b |", "| --- | --- |", *rows]))
    cells = [after.content for token, after in pairwise(found) if token.type == "td_open"]
    assert len(cells) == 2 * len(NASTY)
    assert [shown(cell) for cell in cells[::2]] == [" ".join(each.split()) for each in NASTY]
    assert not {"html_inline", "html_block", "link_open", "image"} & {token.type for token in found}


def test_what_does_not_print_is_spelt_out_and_a_block_is_code() -> None:
    assert shown(card.inline("a\n b\x1b[31m\u202egpj\udcff\u3000日本")) == "a b\\x1b[31m\\u202egpj\\udcff 日本"
    assert "\x1b" not in progress.indented("a\x1b]0;b\u2028c")
    assert "می\u200cخواهم\u3000\tb" in progress.indented("می\u200cخواهم\u3000\tb")
    for text in ("\n".join(NASTY), "a\n\n\n  b\n```", ""):
        blocks = tokens(f"greedy:\n\n{progress.indented(text)}\n")
        assert {token.type for token in blocks} <= PLAIN | {"code_block"}
