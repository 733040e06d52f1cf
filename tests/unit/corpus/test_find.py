"""Entries of the configuration → files of the corpus."""

from __future__ import annotations

import gzip
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from zerokara.corpus import find
from zerokara.corpus.find import CORPUS, check_unchanged, find_files
from zerokara.errors import Fault, RunError, UserError


def _write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}\n', encoding="utf-8")


def _names(folder: Path, *entries: str) -> list[tuple[int, str]]:
    files = find_files([str(folder / entry) for entry in entries], "config.yaml:3")
    return [(file.source, str(file.path.relative_to(folder))) for file in files]


def _fault(*entries: str) -> Fault:
    with pytest.raises(UserError) as raised:
        find_files(entries, "config.yaml:3")
    (fault,) = raised.value.faults
    return fault


def test_a_folder_gives_its_corpus_files_sorted_and_below(tmp_path: Path) -> None:
    _write(tmp_path, "b.jsonl", "a.txt", "sub/c.JSON.gz", "notes.md", ".hidden.txt")
    assert _names(tmp_path, ".") == [(0, "a.txt"), (0, "b.jsonl"), (0, "sub/c.JSON.gz")]


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.jsonl", "jsonl", "none"),
        ("b.jsonl.gz", "jsonl", "gzip"),
        ("b.JSONL.ZST", "jsonl", "zstd"),
        ("c.json", "jsonl", "none"),
        ("v1.2.ndjson", "jsonl", "none"),
        ("d.txt", "txt", "none"),
        ("e.txt.gz", "txt", "gzip"),
        ("e.old.txt.zst", "txt", "zstd"),
        ("train-00000-of-00001.parquet", "parquet", "none"),
    ],
)
def test_formats_come_from_names(tmp_path: Path, name: str, kind: str, compression: str) -> None:
    _write(tmp_path, name)
    (file,) = find_files([str(tmp_path)], "")
    assert (file.format, file.compression, file.is_compressed) == (kind, compression, compression != "none")
    assert file.name == str(tmp_path / name) and pickle.loads(pickle.dumps(file)) == file


def test_names_of_no_format(tmp_path: Path) -> None:
    for name in ("a.gz", "a.zst", "gz", "txt", "a.parquet.gz", "a.jsonl.bz2", "a.csv", "a.txt.gz.bak", "README"):
        assert CORPUS.of(name) is None, name


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
    assert "of a format known here: .jsonl" in first and f"{tmp_path} holds corpus.jsonl, empty" in first
    assert "there is no folder" in second and "is empty" in third and "there is no folder" in fourth


def test_unknown_format(tmp_path: Path) -> None:
    _write(tmp_path, "a.docx")
    fault = _fault(str(tmp_path / "a.docx"))
    assert fault.where == "config.yaml:3" and fault.value == str(tmp_path / "a.docx") and ".jsonl" in fault.rule


def test_a_file_named_twice_is_a_fault(tmp_path: Path) -> None:
    _write(tmp_path, "a.jsonl", "b.jsonl")
    fault = _fault(str(tmp_path / "*.jsonl"), str(tmp_path / "a.jsonl"))
    assert fault.value == str(tmp_path / "a.jsonl") and str(tmp_path / "*.jsonl") in fault.rule


def test_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    fault = _fault(str(tmp_path / "a.jsonl"))
    assert fault.where == "config.yaml:3" and "0 bytes" in fault.rule


def test_the_embedded_corpus_tells_how_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    remedy = _fault("data/embedded/corpus.jsonl").remedy
    assert remedy.endswith(".venv/bin/python -m zerokara.corpus.embedded data/embedded/corpus.jsonl")


def test_a_list_names_entries_that_form_one_source(tmp_path: Path) -> None:
    _write(tmp_path, "x1.jsonl", "x2.jsonl", "y/one.txt", "y/deep/two.txt.zst", "elsewhere/z.parquet")
    lines = ["# first the second", "x2.jsonl", "", "  y  ", f"{tmp_path}/elsewhere/*.parquet", "# end"]
    (tmp_path / "list.txt").write_text("\r\n".join(lines), encoding="utf-8-sig")
    files = find_files([f"@{tmp_path}/list.txt", str(tmp_path / "x1.jsonl")], "config.yaml:3")
    assert [(file.source, str(file.path.relative_to(tmp_path))) for file in files] == [
        (0, "x2.jsonl"),
        (0, "y/deep/two.txt.zst"),
        (0, "y/one.txt"),
        (0, "elsewhere/z.parquet"),
        (1, "x1.jsonl"),
    ]


def test_a_list_is_relative_to_its_folder_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, "data/a.jsonl", "other/b.txt")
    (tmp_path / "data" / "list").write_text("a.jsonl\n../other/*.txt\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert [file.path.name for file in find_files(["@data/list"], "")] == ["a.jsonl", "b.txt"]


def test_what_is_wrong_in_a_list_is_told_with_its_line(tmp_path: Path) -> None:
    _write(tmp_path, "a.jsonl")
    (tmp_path / "bad.txt").write_text("a.jsonl\n# more\nb.jsonl\n@other.txt\n", encoding="utf-8")
    (tmp_path / "none.txt").write_text("# nothing yet\n\n", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9.txt\n")
    entries = [f"@{tmp_path}/{name}.txt" for name in ("bad", "none", "latin", "gone")]
    with pytest.raises(UserError) as raised:
        find_files(entries, "config.yaml:3")
    second_file, nested, empty, latin, gone = raised.value.faults
    assert (second_file.where, second_file.value) == (f"{tmp_path}/bad.txt:3", f"{tmp_path}/b.jsonl")
    assert (nested.where, nested.value) == (f"{tmp_path}/bad.txt:4", "@other.txt")
    assert [fault.value for fault in (empty, latin, gone)] == entries[1:]
    assert "UTF-8" in latin.rule and "No such file" in gone.rule and "bad.txt" in gone.remedy


def test_a_change_is_told(tmp_path: Path) -> None:
    _write(tmp_path, "a.jsonl")
    files = find_files([str(tmp_path)], "")
    check_unchanged(files)
    with open(tmp_path / "a.jsonl", "a", encoding="utf-8") as opened:
        opened.write("more")
    with pytest.raises(RunError, match="it had 14 bytes, now 18"):
        check_unchanged(files)


def test_local_files_need_neither_fsspec_nor_pyarrow(tmp_path: Path) -> None:
    _write(tmp_path, "a.jsonl")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    program = (
        "import sys; from zerokara.corpus import format_check, find, read\n"
        "files = find.find_files(sys.argv[1:], '')\n"
        "format_check.check_formats(files, 'text', 'line', '')\n"
        "assert sum(1 for part in read.ranges(files, 5) for _ in read.read(part)) == 2\n"
        "heavy = {'huggingface_hub', 'pyarrow', 'pydantic', 'torch', 'numpy', 'backports', 'fsspec'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(find.__file__).parents[2])}
    command = [sys.executable, "-c", program, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert run.stdout == "[]\n"
