"""Entries of the configuration → files of the corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerokara.corpus.inputs import find_files
from zerokara.errors import UserError


def _write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}\n', encoding="utf-8")


def _names(folder: Path, *entries: str) -> list[tuple[int, str]]:
    files = find_files([str(folder / entry) for entry in entries], "config.yaml:3")
    return [(file.source, str(file.path.relative_to(folder))) for file in files]


def test_a_folder_gives_its_corpus_files_sorted_and_below(tmp_path: Path) -> None:
    _write(tmp_path, "b.jsonl", "a.txt", "sub/c.JSON.gz", "notes.md", ".hidden.txt")
    assert _names(tmp_path, ".") == [(0, "a.txt"), (0, "b.jsonl"), (0, "sub/c.JSON.gz")]


def test_formats_come_from_names(tmp_path: Path) -> None:
    _write(tmp_path, "a.jsonl", "b.jsonl.gz", "c.json", "d.txt", "e.txt.gz", "v1.2.ndjson")
    found = [(file.kind, file.gzipped) for file in find_files([str(tmp_path)], "")]
    jsonl, txt = "jsonl", "txt"
    assert found == [(jsonl, False), (jsonl, True), (jsonl, False), (txt, False), (txt, True), (jsonl, False)]


def test_each_entry_is_a_source_and_globs_expand(tmp_path: Path) -> None:
    _write(tmp_path, "x1.jsonl", "x2.jsonl", "y/one.txt", "y/deep/two.txt", "exact[1].txt")
    assert _names(tmp_path, "y/**/*.txt", "x*.jsonl") == [
        (0, "y/deep/two.txt"),
        (0, "y/one.txt"),
        (1, "x1.jsonl"),
        (1, "x2.jsonl"),
    ]
    assert _names(tmp_path, "exact[1].txt") == [(0, "exact[1].txt")]


def test_files_that_our_steps_wrote_are_no_corpus(tmp_path: Path) -> None:
    _write(tmp_path, "a.jsonl", "ja_quarantine.jsonl", "ja_text_document.manifest.json", "b.txt.partial")
    assert _names(tmp_path, ".", ) == [(0, "a.jsonl")]  # fmt: skip
    assert _names(tmp_path, "*.json*") == [(0, "a.jsonl")]


def test_every_missing_entry_is_named_with_what_was_looked_for(tmp_path: Path) -> None:
    _write(tmp_path, "corpus.jsonl")
    (tmp_path / "empty").mkdir()
    entries = ["korpus.jsonl", "nowhere/*.txt", "empty", "nowhere/x.txt"]
    with pytest.raises(UserError) as raised:
        find_files([str(tmp_path / entry) for entry in entries], "config.yaml:3")
    first, second, third, fourth = (str(fault) for fault in raised.value.faults)
    assert first.startswith("config.yaml:3:") and "korpus.jsonl" in first
    assert "as a file or a folder" in first and "holds corpus.jsonl, empty" in first
    assert "the pattern" in second and "there is no folder" in second
    assert "in the folder and below" in third and "is empty" in third
    assert "nowhere is not" in fourth or "there is no folder" in fourth


def test_unknown_format(tmp_path: Path) -> None:
    _write(tmp_path, "a.docx")
    with pytest.raises(UserError, match=r"a\.docx: is of no format known here: \.jsonl, .* or \.txt"):
        find_files([str(tmp_path / "a.docx")], "config.yaml:3")


def test_a_file_named_twice_is_a_fault(tmp_path: Path) -> None:
    _write(tmp_path, "a.jsonl", "b.jsonl")
    with pytest.raises(UserError, match=r"names .*a\.jsonl, which .*\*\.jsonl names already"):
        _names(tmp_path, "*.jsonl", "a.jsonl")


def test_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(UserError, match="the corpus is empty: 1 files, 0 bytes"):
        _names(tmp_path, "a.jsonl")


def test_the_embedded_corpus_tells_how_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"make it with: \.venv/bin/python -m zerokara\.corpus\.embedded data/embedded/"
    ):
        find_files(["data/embedded/corpus.jsonl"], "config.yaml:3")
