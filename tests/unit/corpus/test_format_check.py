"""Faults that the first lines show before anything is encoded."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from configs import fault_of
from corpus_files import COMPRESS, compressed, write_jsonl

from zerokara.base.errors import RunError
from zerokara.corpus import documents, format_check
from zerokara.corpus.find import find_files
from zerokara.corpus.format_check import check_formats

GOOD = b'{"text": "x"}\n' * 20


def _check(*paths: Path | str, text_field: str = "text", txt_document: format_check.TxtDocument = "line") -> None:
    check_formats(find_files([str(path) for path in paths], ""), text_field, txt_document, "config.yaml:5")


def test_some_bad_lines_are_the_quarantine_s_business(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*[{"body": "x"}] * 20, {"text": "x"}])
    write_jsonl(tmp_path / "b.jsonl", [{"body": "a short file, bad by chance"}])
    (tmp_path / "labels.json").write_bytes(b'["one bad line", "by chance"]')
    _check(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("a.jsonl", b"[\n" + b'{"text": "x"},\n' * 20 + b"]\n", "one JSON array"),
        ("a.json.gz", b"[" + b",".join([b'{"text": "x"}'] * 1000) + b"]", "one JSON array"),
        ("a.jsonl", b'{"text": "x"}\r' * 1000, "CR alone"),
        ("a.jsonl.gz", '{"text": "x"}'.encode("utf-16"), "iconv -f UTF-16 "),
        ("a.txt.zst", "日本語の文書。春の海、終日のたりのたりかな。\n".encode("utf-16-be") * 5, "iconv -f UTF-16BE "),
        ("a.txt", "uma linha\nção\n".encode("utf-32-be") * 2, "iconv -f UTF-32BE "),
        ("a.txt", "日本語の文書。\n".encode("iso2022_jp"), "iconv -f ISO2022JP "),
        ("a.txt", "日本語の文書。春の海、終日のたり。\n".encode("euc_jp") * 5, "iconv -f EUCJP "),
        ("a.txt", "이것은 문서입니다. 한국어 문장.\n".encode("euc_kr") * 5, "iconv -f CP949 "),
        ("a.txt", "这是一个文件。中文句子在这里。\n".encode("gbk") * 5, "iconv -f GB18030 "),
        ("a.txt", "Não há nada. É só São Tomé.\n".encode("latin-1") * 10, "must be UTF-8"),
        ("a.jsonl", '{"text": "Não há nada."}\n'.encode("latin-1") * 10, "must be UTF-8"),
        ("a.jsonl", b'{"text": "x"}{"text": "y"} {"text": "z"}', "jq -c ."),
        ("a.json", b'{\n  "text": "x"\n}\n' * 9, "one object a line"),
        ("a.jsonl", b"plain text\nin lines\n" * 5, "one object a line"),
        ("a.txt", "日本語\n日本\n".encode("shift_jis") * 5, "iconv -f CP932 "),
    ],
)
def test_a_wrong_format_is_seen_even_among_good_files(tmp_path: Path, name: str, content: bytes, hint: str) -> None:
    compressed(tmp_path / name, content)
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    for entry in (tmp_path / name, tmp_path):
        fault = fault_of(_check, entry)
        assert fault.where == f"{tmp_path / name}:1" and hint in fault.remedy


def test_chinese_in_ascii_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("这是一个文件。中文句子在这里。\n".encode("hz") * 3)
    assert "HZ" in fault_of(_check, tmp_path / "a.txt").rule
    (tmp_path / "a.txt").write_text("~{ and ~} of a program, ~{2}\n" * 3, encoding="utf-8")
    _check(tmp_path / "a.txt")


@pytest.mark.parametrize("values", [[""], [None], [" ", None]])
def test_empty_texts_tell_nothing_about_the_format(tmp_path: Path, values: list[str | None]) -> None:
    head = [{"text": value} for value in values] * 60
    for rest in ([], [{"text": "x"}], [*[{"body": "x"}] * 49, {"text": "x"}]):
        _check(write_jsonl(tmp_path / "a.jsonl", [*head, *rest]))
    pq.write_table(pa.Table.from_pylist([*head, {"text": "x"}]), tmp_path / "a.parquet")
    _check(tmp_path / "a.parquet")
    path = write_jsonl(tmp_path / "a.jsonl", [*head, *[{"body": "x"}] * 50, {"text": "x"}])
    line = len(head) + 1
    fault = fault_of(_check, path)
    assert fault.where == f"{path}:{line}" and "49 lines" in fault.rule and "body" in fault.remedy


def test_not_all_empty_lines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    for limit, lines in (("MAX_LINES", 80), ("MAX_BYTES", 79)):
        with monkeypatch.context() as patched:
            patched.setattr(format_check, limit, 80)
            path.write_bytes(b"\n" * lines + b"no JSON\n" * 50)
            _check(path) if limit == "MAX_LINES" else None
            path.write_bytes(b"\n" * (lines - 60) + b"no JSON\n" * 50)
            assert "one object a line" in fault_of(_check, path).remedy


@pytest.mark.parametrize(
    ("name", "content", "found", "wanted"),
    [
        ("a.jsonl", gzip.compress(GOOD), "gzip", ".gz"),
        ("a.jsonl.gz", COMPRESS[".zst"](GOOD), "zstd", ".zst"),
        ("a.txt", COMPRESS[".zst"](GOOD), "zstd", ".zst"),
        ("a.jsonl", b"PAR1" + bytes(99) + b"PAR1", "parquet", ".parquet"),
        ("a.parquet", GOOD, "plain text", ".jsonl or .txt"),
        ("a.jsonl.gz", GOOD, "plain text", ".jsonl or .txt"),
        ("a.jsonl.zst", "日本語".encode() * 400, "plain text", ".jsonl or .txt"),
        ("a.parquet", gzip.compress(GOOD), "gzip", ".gz"),
    ],
)
def test_a_misnamed_file_among_good_ones(tmp_path: Path, name: str, content: bytes, found: str, wanted: str) -> None:
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    _check(tmp_path)
    (tmp_path / name).write_bytes(content)
    fault = fault_of(_check, tmp_path)
    assert fault.where == str(tmp_path / name) and f"the file is {found}" in fault.rule and wanted in fault.remedy


def _any_format(path: Path, field: str) -> Path:
    records = [{field: "x", "id": number} for number in range(30)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
        return path
    return compressed(path, b"".join(json.dumps(record).encode() + b"\n" for record in records))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_missing_field_names_the_other_fields(tmp_path: Path, name: str) -> None:
    path = _any_format(tmp_path / name, "body")
    (tmp_path / "good").mkdir()
    for entries in ([path], [path, _any_format(tmp_path / "good" / name, "text")]):
        fault = fault_of(_check, *entries)
        assert fault.where == f"{path}:1" and "'text'" in fault.rule and "next 29 " in fault.rule
        assert "body, id" in fault.remedy and "text_field (config.yaml:5)" in fault.remedy
    _check(path, text_field="body")
    _check(tmp_path / "good" / name)


def test_a_parquet_column_of_another_type_names_the_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [[1]] * 30, "body": ["x"] * 30}), tmp_path / "a.parquet")
    fault = fault_of(_check, tmp_path / "a.parquet")
    assert "a column of list" in fault.rule and "text, body" in fault.remedy
    pq.write_table(pa.table({"text": [[1]] * 30}), tmp_path / "a.parquet")
    assert fault_of(_check, tmp_path / "a.parquet").remedy == "it is the only field: convert it to strings"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_damaged_head_fails_alone_and_is_the_quarantine_s_business_among_others(tmp_path: Path, name: str) -> None:
    path = _any_format(tmp_path / name, "text")
    content = path.read_bytes()
    path.write_bytes(content[:6] + b"\xff" * (len(content) - 6))
    assert "truncated or damaged file" in fault_of(_check, path).rule
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    _check(tmp_path)


def test_a_disk_that_fails_is_reported(tmp_path: Path) -> None:
    files = find_files([write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}] * 20)], "")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(RunError, match=r"cannot read .*a\.jsonl: No such file"):
        check_formats(files, "text", "line", "config.yaml:5")


def test_a_book_in_another_encoding_after_lines_in_ascii(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(b"The Project\n" * 30 + "é página\n".encode("latin-1") * 20 + b"a\rb\n")
    fault = fault_of(_check, tmp_path / "book.txt", txt_document="file")
    assert fault.where.endswith("book.txt:31") and "20 lines cannot be read: invalid UTF-8" in fault.rule
    assert "iconv" in fault.remedy
    _check(tmp_path / "book.txt", txt_document="line")
    (tmp_path / "book.txt").write_bytes(b"The Project\na\rb\n")
    _check(tmp_path / "book.txt", txt_document="file")


def test_a_large_txt_as_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 10)
    (tmp_path / "a.txt").write_text("line one\nline two\n", encoding="utf-8")
    fault = fault_of(_check, tmp_path / "a.txt", txt_document="file")
    assert "18 bytes" in fault.rule and "txt_document: line" in fault.remedy
    _check(tmp_path / "a.txt", txt_document="line")
    for number in range(300):
        (tmp_path / f"small{number}.txt").write_text("a text", encoding="utf-8")
    files = find_files([str(tmp_path)], "")
    assert fault_of(check_formats, files, "text", "file", "").where.endswith("a.txt"), "among others, of any number"
