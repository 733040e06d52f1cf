"""Docstrings of installed packages → documents, on a small installation made here."""

from pathlib import Path

import pytest

from zerokara.corpus import embedded

PROSE = "This sentence is long enough to count as prose, and it says what the thing is for. " * 3
MODULE = f'''"""The words of a module stand here. {PROSE}"""
TABLE = """
no prose at all
"""

def public(a, *rest, key=None, **more):
    """The words of a function stand
    in two lines of it.

    :param a: The words of a field stand here.
    """

class Thing:
    """The words of a class stand here."""

    def copy(self):
        """The copied words of it stand in two places."""
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stdlib, packages = tmp_path / "stdlib", tmp_path / "packages"
    sources = {
        "packages/good/__init__.py": MODULE,
        "packages/good/other.py": f'"""Other words: {PROSE}"""\n"""The copied words of it stand in two places."""\n',
        "packages/good/tests/test_x.py": f'"""Test words. {PROSE}"""',
        "packages/good/_vendor/v.py": f'"""Vendored words. {PROSE}"""',
        "packages/good/licence.py": f'"""Copyright (c) somebody. {PROSE}"""',
        "packages/pip/__init__.py": f'"""Pip words. {PROSE}"""',
        "stdlib/single.py": f'"""Single words. {PROSE}"""',
        "stdlib/short.py": '"""It is too short to be a document."""',
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source, encoding="utf-8")
    (packages / "good/latin.py").write_bytes(b'"""Words in a caf\xe9."""')
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(stdlib if name == "stdlib" else packages))
    return packages


@pytest.mark.usefixtures("library")
def test_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    records = {document["source"]: document["text"] for document in embedded.documents()}
    assert set(records) == {"single", "good", "good.other"}
    assert records["good"].split("\n")[:3] == [
        f"The words of a module stand here. {PROSE.strip()}",
        "The words of a function stand in two lines of it.",
        "The words of a class stand here.",
    ]
    assert "".join(records.values()).count("copied words") == 1
    monkeypatch.setattr(embedded, "MAX_PACKAGE_CHARACTERS", 10)
    assert len([each for each in embedded.documents() if each["source"].startswith("good")]) == 1


@pytest.mark.usefixtures("library")
def test_a_file_that_is_there_stays_and_the_same_installation_gives_the_same_bytes(tmp_path: Path) -> None:
    mine, first, second = (tmp_path / name for name in ("mine.jsonl", "first.jsonl", "second.jsonl"))
    mine.write_bytes(b"mine\n")
    for path in (mine, first, second):
        embedded.main(path)
    assert mine.read_bytes() == b"mine\n" and first.read_bytes() == second.read_bytes() != b""
