"""Docstrings of installed packages → documents, on a small installation made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerokara.corpus import embedded

PROSE = "This sentence is long enough to count as prose, and it says what the thing is for. " * 3
MODULE = f'''"""The words of a module stand here. {PROSE}"""
# The words of a comment stand here,
# and go on in the next line.

def public(a, *rest, key=None, **more):
    """The words of a function stand here.

        The indented words of it stand here.

    :param a: The words of a field stand here.
    """

def _private():
    """The words of something private stand here."""

class Thing:
    """The words of a class stand here."""

    def method(self, b):
        """The words of a method stand here."""

    def copy(self):
        """The copied words of it stand in two places."""
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stdlib, packages = tmp_path / "stdlib", tmp_path / "packages"
    sources = {
        "packages/good/__init__.py": MODULE,
        "packages/good/other.py": f'''"""Other words: {PROSE}"""
def f():
    """The copied words of it stand in two places."""
''',
        "packages/good/tests/test_x.py": f'"""Test words. {PROSE}"""',
        "packages/good/_vendor/v.py": f'"""Vendored words. {PROSE}"""',
        "packages/good/broken.py": '"""Broken""" for other versions (',
        "packages/good/licence.py": f'"""Copyright (c) somebody. {PROSE}"""',
        "packages/pip/__init__.py": f'"""Pip words. {PROSE}"""',
        "stdlib/single.py": f'"""Single words. {PROSE}"""',
        "stdlib/pydoc_data/topics.py": "topics = {'FOR': 'The for statement\\n*****\\n\\n" + PROSE + "'}\n",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source, encoding="utf-8")
    monkeypatch.setattr(embedded, "_library_folders", lambda: [stdlib, packages])
    return packages


def _records(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {record["source"]: record["text"] for record in map(json.loads, lines)}


def test_documents(library: Path, tmp_path: Path) -> None:
    assert embedded.write(tmp_path / "out" / "corpus.jsonl")
    records = _records(tmp_path / "out" / "corpus.jsonl")
    assert set(records) == {"single", "good", "good.other", "topic FOR"}
    assert records["good"].split("\n") == [
        f"The words of a module stand here. {PROSE.strip()}",
        "The words of a comment stand here, and go on in the next line.",
        "The words of a function stand here.",
        "The indented words of it stand here.",
        "The words of something private stand here.",
        "The words of a class stand here.",
        "The words of a method stand here.",
        "The copied words of it stand in two places.",
    ]
    assert "".join(records.values()).count("copied words") == 1


@pytest.mark.usefixtures("library")
def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"mine\n")
    assert embedded.main([str(path)]) == 0
    assert "there already" in capsys.readouterr().out and path.read_bytes() == b"mine\n"
    path.unlink()
    assert embedded.write(path)
    before = path.read_bytes()
    path.unlink()
    assert embedded.write(path) and path.read_bytes() == before


def test_a_package_beyond_the_limit_is_cut(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "MAX_PACKAGE_CHARACTERS", 10)
    path = tmp_path / "corpus.jsonl"
    assert embedded.main([str(path)]) == 0
    assert len([source for source in _records(path) if source.startswith("good")]) == 1
    assert "written in" in capsys.readouterr().out


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
    assert list(embedded.prose(text)) == expected


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
    assert list(embedded.prose(text)) == []


def test_a_literal_block_ends_where_its_indentation_does() -> None:
    text = f"""{SENTENCE} It is used like this::

        It looks like a sentence, but it is shown as it stands.

    It is the paragraph that comes after the block.
    """
    assert list(embedded.prose(text)) == [SENTENCE, "It is the paragraph that comes after the block."]


def test_a_paragraph_of_which_little_is_prose_is_left_out() -> None:
    code = "The f_1(x_1) of g_2(y_2) is h_3(z_3)."
    assert list(embedded.prose(f"{SENTENCE} {code}")) == [SENTENCE]
    assert list(embedded.prose(f"{SENTENCE} {code} {code} {code}")) == []
