"""What a look at the first lines tells before anything is encoded."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zerokara.corpus import documents, format_check
from zerokara.corpus.format_check import check_formats
from zerokara.corpus.inputs import find_files
from zerokara.corpus.packed import zstd_module
from zerokara.errors import RunError, UserError

zstd: ModuleType = zstd_module()


def _check(*paths: Path, text_field: str = "text", txt_document: format_check.TxtDocument = "line") -> None:
    check_formats(find_files([str(path) for path in paths], ""), text_field, txt_document, "config.yaml:5")


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


EMPTY: dict[str, list[object]] = {
    "empty": [{"text": ""}],
    "null": [{"text": None}],
    "both": [{"text": " "}, {"text": None}],
}


@pytest.mark.parametrize("kind", EMPTY)
def test_empty_texts_tell_nothing_about_the_format(tmp_path: Path, kind: str) -> None:
    head = EMPTY[kind] * 60
    _check(_jsonl(tmp_path / "a.jsonl", *head, {"text": "x"}))
    _check(_jsonl(tmp_path / "a.jsonl", *head, *[{"body": "x"}] * 49, {"text": "x"}))
    _check(_jsonl(tmp_path / "a.jsonl", *head))
    pq.write_table(pa.Table.from_pylist([*head, {"text": "x"}]), tmp_path / "a.parquet")
    _check(tmp_path / "a.parquet")
    path = _jsonl(tmp_path / "a.jsonl", *head, *[{"body": "x"}] * 50, {"text": "x"})
    line = len(head) + 1
    with pytest.raises(
        UserError, match=rf"a\.jsonl:{line}: has no field 'text', nor have the next 49 lines; .*: body;"
    ):
        _check(path)


def test_the_look_at_empty_lines_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    for limit, lines in (("MAX_LINES", 80), ("MAX_BYTES", 79)):
        with monkeypatch.context() as patched:
            patched.setattr(format_check, limit, 80)
            path.write_bytes(b"\n" * lines + b"no JSON\n" * 50)
            _check(path) if limit == "MAX_LINES" else None
            path.write_bytes(b"\n" * (lines - 60) + b"no JSON\n" * 50)
            with pytest.raises(UserError, match="one object a line"):
                _check(path)


GOOD = b'{"text": "x"}\n' * 20


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", gzip.compress(GOOD), "the file is gzip, other than its name says; let its name end in .gz"),
        ("a.jsonl.gz", zstd.compress(GOOD), "the file is zstd, other than its name says; let its name end in .zst"),
        ("a.txt", zstd.compress(GOOD), "the file is zstd"),
        ("a.jsonl", b"PAR1" + bytes(99) + b"PAR1", "the file is parquet.*let its name end in .parquet"),
        ("a.parquet", GOOD, "is plain text, and parquet by its name; let its name end in .jsonl or .txt"),
        ("a.jsonl.gz", GOOD, "is plain text, and gzip by its name; take .gz off its name"),
        ("a.jsonl.zst", "日本語".encode() * 400, "is plain text, and zstd by its name; take .zst off its name"),
        ("a.parquet", gzip.compress(GOOD), "the file is gzip"),
    ],
)
def test_a_file_under_a_wrong_name_is_told_even_among_good_ones(
    tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    _check(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: .*{told}"):
        _check(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[" + b",".join([b'{"text": "x"}'] * 1000) + b"]", "the file is one JSON array"),
        (b'\xef\xbb\xbf[\r\n {"text": "x"},\r\n {"text": "y"}]', "the file is one JSON array"),
        (b'{"text": "x"}\r' * 1000, r"its lines end in CR alone; write it anew, e\.g\. with: tr"),
        ('{"text": "x"}'.encode("utf-16"), "the file is UTF-16"),
    ],
)
def test_a_whole_file_on_one_line_is_told_even_among_good_ones(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    for name in ("a.jsonl", "a.json.gz"):
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        with pytest.raises(UserError, match=rf"{name}:1: none of the first \d+ lines is a document: .*{told}"):
            _check(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "labels.json").write_bytes(b'["one bad line", "by chance"]')
    _check(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_good_files_of_every_format_pass_and_a_missing_field_is_told(tmp_path: Path, name: str) -> None:
    _check(_any_format(tmp_path / name, "text"))
    path = _any_format(tmp_path / name, "body")
    with pytest.raises(
        UserError, match=r"(?s)has no field 'text', nor have the next .*fields there are: body, id"
    ) as raised:
        _check(path)
    assert f"{path}:1: " in str(raised.value) and "set text_field (config.yaml:5)" in str(raised.value)
    _check(path, text_field="body")


def _any_format(path: Path, field: str) -> Path:
    records = [{field: "x", "id": number} for number in range(30)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
        return path
    content = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    path.write_bytes({".gz": gzip.compress, ".zst": zstd.compress}.get(path.suffix, bytes)(content))
    return path


def test_a_parquet_column_of_another_type_names_the_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [[1]] * 30, "body": ["x"] * 30}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"does not hold text but a column of list.*fields there are: text, body"):
        _check(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_damaged_head_fails_alone_and_is_the_quarantine_s_business_among_others(tmp_path: Path, name: str) -> None:
    path = _any_format(tmp_path / name, "text")
    content = path.read_bytes()
    path.write_bytes(content[:6] + b"\xff" * (len(content) - 6))
    with pytest.raises(UserError, match=r"truncated or damaged file.*get or make the file anew"):
        _check(path)
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    _check(tmp_path)


def test_byte_order_marks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD)
    _check(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf[{"text": "x"},\n{"text": "y"}]\n')
    with pytest.raises(UserError, match="one JSON array"):
        _check(tmp_path / "a.jsonl")


def test_a_disk_that_fails_is_told(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", *[{"text": "x"}] * 20)
    files = find_files([str(path)], "")
    path.unlink()
    with pytest.raises(RunError, match=r"cannot read .*a\.jsonl: No such file"):
        check_formats(files, "text", "line", "config.yaml:5")


def test_a_large_txt_as_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 10)
    (tmp_path / "a.txt").write_text("line one\nline two\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"is one document of 18 bytes; .*set txt_document: line"):
        _check(tmp_path / "a.txt", txt_document="file")
    _check(tmp_path / "a.txt", txt_document="line")
