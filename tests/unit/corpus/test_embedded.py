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
        "packages/good-1.0.dist-info/METADATA": "",
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


def test_written_once_for_an_installation_and_anew_for_another(library: Path, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    assert embedded.write(path)
    before = path.read_bytes()
    assert not embedded.write(path)
    (library / "good-1.0.dist-info").rename(library / "good-1.1.dist-info")
    assert embedded.write(path)
    assert path.read_bytes() == before
    path.unlink()
    assert embedded.write(path)


def test_somebody_elses_file_is_not_replaced(library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"mine\n")
    assert embedded.main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err and path.read_bytes() == b"mine\n"
    path.unlink()
    assert embedded.write(path)
    path.with_suffix(".manifest.json").unlink()  # killed before it was written
    assert embedded.write(path)
    path.write_bytes(path.read_bytes() + b"mine\n")
    (library / "good-1.0.dist-info").rename(library / "good-1.1.dist-info")
    assert embedded.main([str(path)]) == 2
    assert path.read_bytes().endswith(b"mine\n")


def test_a_package_beyond_the_limit_is_cut(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "MAX_PACKAGE_CHARACTERS", 10)
    path = tmp_path / "corpus.jsonl"
    assert embedded.main([str(path)]) == 0
    assert len([source for source in _records(path) if source.startswith("good")]) == 1
    assert "3 documents" in capsys.readouterr().out
