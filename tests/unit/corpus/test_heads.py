"""What a look at the first lines tells before anything is encoded."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from zerokara.corpus import heads
from zerokara.corpus.heads import check_heads
from zerokara.corpus.inputs import find_files
from zerokara.errors import UserError


def _check(*paths: Path, text_field: str = "text", txt_document: heads.TxtDocument = "line") -> None:
    check_heads(find_files([str(path) for path in paths], ""), text_field, txt_document, "config.yaml:5")


def _jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_a_missing_field_names_the_fields_there(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", *[{"body": "x", "id": 1}] * 30)
    with pytest.raises(UserError) as raised:
        _check(path)
    message = str(raised.value)
    assert f"{path}:1: has no field 'text', nor have the next 29 lines" in message
    assert "the fields there are: body, id; set text_field (config.yaml:5)" in message
    _check(path, text_field="body")


def test_one_file_of_many_with_another_field_is_found(tmp_path: Path) -> None:
    _jsonl(tmp_path / "a.jsonl", *[{"text": "x"}] * 20)
    _jsonl(tmp_path / "b.jsonl", *[{"content": "x"}] * 20)
    with pytest.raises(UserError, match=r"b\.jsonl:1: .*content"):
        _check(tmp_path)


def test_some_bad_lines_are_the_quarantine_s_business(tmp_path: Path) -> None:
    _jsonl(tmp_path / "a.jsonl", *[{"body": "x"}] * 20, {"text": "x"})
    _jsonl(tmp_path / "b.jsonl", {"body": "a short file, bad by chance"})
    _check(tmp_path)


def test_wrong_type(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="field 'text' does not hold text"):
        _check(_jsonl(tmp_path / "a.jsonl", *[{"text": ["x"]}] * 20))


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("a.jsonl", b"[\n" + b'{"text": "x"},\n' * 20 + b"]\n", "one JSON array"),
        ("a.jsonl", gzip.compress(b'{"text": "x"}\n'), "let its name end in .gz"),
        ("a.jsonl", "plain text\nin lines\n".encode("utf-16"), "UTF-16"),
        ("a.jsonl", b"plain text\nin lines\n", "one object a line"),
        ("a.txt", "日本語\n日本\n".encode("shift_jis"), "iconv -f SHIFT_JIS"),
    ],
)
def test_a_wrong_format_is_recognised(tmp_path: Path, name: str, content: bytes, hint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"none of the first .* lines is a document: ") as raised:
        _check(tmp_path / name)
    assert hint in str(raised.value)


def test_a_large_txt_as_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MAX_LINE_BYTES", 10)
    (tmp_path / "a.txt").write_text("line one\nline two\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"is one document of 18 bytes; .*set txt_document: line"):
        _check(tmp_path / "a.txt", txt_document="file")
    _check(tmp_path / "a.txt", txt_document="line")
