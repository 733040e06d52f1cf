"""Docstrings and comments → prose."""

from __future__ import annotations

import pytest

from zerokara.corpus.prose import prose

SENTENCE = "This sentence is long enough, and it says what the thing is for."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SENTENCE, [SENTENCE]),
        ("It goes on over\ntwo lines of text.\n\nThe next one is a new paragraph.",
         ["It goes on over two lines of text.", "The next one is a new paragraph."]),
        ("- The first item of a list\n  has two lines of text.\n- The second one has a line.",
         ["The first item of a list has two lines of text.", "The second one has a line."]),
        ("It is the :class:`~package.module.Widget` that holds *all* of ``them`` and `more <https://a.b>`_ of it.",
         ["It is the Widget that holds all of them and more of it."]),
        ("The \u201ctypographic\u201d quotation marks of it aren\u2019t kept.",
         ["The \"typographic\" quotation marks of it aren't kept."]),
    ],
)  # fmt: skip
def test_prose(text: str, expected: list[str]) -> None:
    assert list(prose(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Too short a text.",
        "no capital letter at the beginning of it, and so a part of something.",
        "It does not end with a full stop as it should",
        "It has 12 of the 345 numbers that are in it.",
        "Alpha, Beta, Gamma, Delta, Epsilon, Zeta, Eta, Theta.",
        ":param x: The description of the parameter is a sentence.",
        ">>> print('It is a line of code that has words in it.')",
        "| It is the cell | of a table that has words in it. |",
        "Set the value_of_it with set_value and get_value of the_class.",
        "It has (an open bracket in the middle of it.",
    ],
)
def test_no_prose(text: str) -> None:
    assert list(prose(text)) == []


def test_a_literal_block_ends_where_its_indentation_does() -> None:
    text = f"""{SENTENCE} It is used like this::

        It looks like a sentence, but it is shown as it stands.

    It is the paragraph that comes after the block.
    """
    assert list(prose(text)) == [SENTENCE, "It is the paragraph that comes after the block."]


def test_a_paragraph_of_which_little_is_prose_is_left_out() -> None:
    code = "The f_1(x_1) of g_2(y_2) is h_3(z_3)."
    assert list(prose(f"{SENTENCE} {code}")) == [SENTENCE]
    assert list(prose(f"{SENTENCE} {code} {code} {code}")) == []
