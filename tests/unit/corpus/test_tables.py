"""Rows of a .parquet → documents: every row once, every reason, damage told once a row group, in bounded memory."""

import io
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_files import found
from programs import run_program

from zerokara.corpus import documents
from zerokara.corpus.find import InputFile
from zerokara.corpus.read import BadLine, Document, Range, Reason, ranges, read, total_plain_bytes

Item = Document | BadLine


def _file(path: Path, table: pa.Table, **options: Any) -> InputFile:
    pq.write_table(table, path, **options)
    return found(path)


def _items(file: InputFile, target_bytes: int = 1 << 40) -> list[Item]:
    return [item for range_ in ranges([file], target_bytes) for item in read(range_)]


def _seen(items: list[Item]) -> list[tuple[int, object]]:
    return [(item.offset, item.text if isinstance(item, Document) else item.reason) for item in items]


def test_row_groups_of_every_gathering_give_each_row_once(tmp_path: Path) -> None:
    texts = [f"文書 {i} {os.urandom(i % 50).hex()}" for i in range(1000)]
    table = pa.table({"id": range(1000), "text": texts})
    file = _file(tmp_path / "a.parquet", table, row_group_size=70)
    assert _seen(_items(file)) == list(enumerate(texts))
    for target in (1, 3000, 10_000, file.bytes - 1):
        parts = ranges([file], target)
        assert sum(part.disk_bytes for part in parts) == file.bytes and len(parts) > 1
        items: list[Item] = []
        for part in parts:
            part_items = list(read(part))
            assert [item.line for item in part_items] == list(range(1, len(part_items) + 1))
            items += part_items
        assert _seen(items) == list(enumerate(texts))
    assert len(ranges([file], 1)) == 15
    assert Range(file).disk_bytes == file.bytes


def test_each_bad_row_is_put_aside_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 50)
    values = [b"good", None, b"", b" \n", b"a\0b", b"\xff\xfe not text", b"x" * 51, "日本".encode(), b"x" * 50]
    column = pa.array(values, pa.binary()).view(pa.string())
    items = _items(_file(tmp_path / "a.parquet", pa.table({"text": column})))
    bad = [Reason.NULL, Reason.EMPTY_TEXT, Reason.EMPTY_TEXT, Reason.NUL, Reason.INVALID_UTF8, Reason.TOO_LONG]
    assert _seen(items) == list(enumerate(["good", *bad, "日本", "x" * 50]))
    shown = [item.excerpt for item in items if isinstance(item, BadLine)]
    assert shown[0] == "null" and "\\xff\\xfe not" in shown[4]


KINDS = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()]


@pytest.mark.parametrize("kind", [*KINDS, pa.dictionary("int32", pa.string()), pa.null()], ids=str)
def test_text_columns_of_every_kind(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["one", None, "二", "one"] if kind != pa.null() else [None] * 4
    column = pa.nulls(4) if kind == pa.null() else pa.array(texts, pa.string()).cast(kind)
    items = _items(_file(tmp_path / "a.parquet", pa.table({"text": column})))
    assert _seen(items) == [(row, text or Reason.NULL) for row, text in enumerate(texts)]
    assert _items(_file(tmp_path / "empty.parquet", pa.table({"text": pa.array([], kind)}))) == []


def test_columns_that_hold_no_text_and_columns_that_are_not_there(tmp_path: Path) -> None:
    for name, column, reason, message in (
        ("text", [["a"], ["b"]], Reason.WRONG_TYPE, "a column of list"),
        ("text", [1, 2], Reason.WRONG_TYPE, "a column of int64"),
        ("text", [{"text": "a"}, {"text": "b"}], Reason.WRONG_TYPE, "a column of struct"),
        ("body", ["a", "b"], Reason.MISSING_FIELD, "the columns are body, id"),
    ):
        items = _items(_file(tmp_path / "a.parquet", pa.table({name: column, "id": [1, 2]})))
        assert _seen(items) == [(0, reason), (1, reason)]
        assert isinstance(items[0], BadLine) and items[0].excerpt.startswith(message)


def test_a_column_with_a_point_in_its_name_and_one_inside_another(tmp_path: Path) -> None:
    table = pa.table({"a": [{"b": "inside"}], "a.b": ["by name"], "text": ["text"]})
    file = _file(tmp_path / "a.parquet", table)
    assert _seen(list(read(Range(file), "a.b"))) == [(0, "by name")]


@pytest.mark.parametrize("spoil", ["cut", "no footer", "text"])
def test_a_file_that_is_no_parquet_is_told_as_one_bad_line(tmp_path: Path, spoil: str) -> None:
    path = tmp_path / "a.parquet"
    _file(path, pa.table({"text": ["a"] * 1000}))
    content = path.read_bytes()
    path.write_bytes(
        {"cut": content[:-20], "no footer": content[:-8] + b"\xff" * 4 + b"PAR1", "text": b"hello\n" * 9}[spoil]
    )
    file = found(path)
    for target in (1, 1 << 20):
        (item,) = _items(file, target)
        assert isinstance(item, BadLine) and item.reason is Reason.DAMAGED and item.excerpt
    assert total_plain_bytes([file]) == file.bytes


def test_an_error_of_the_disk_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _file(tmp_path / "a.parquet", pa.table({"text": ["a"] * 1000}))

    class Dying(io.FileIO):
        reads = last = 0

        def read(self, size: int | None = -1, /) -> bytes:
            Dying.reads += 1
            if Dying.reads > Dying.last:
                raise OSError(5, "Input/output error", str(file.path))
            return super().read(size)

    monkeypatch.setattr(InputFile, "open", lambda self, buffer_bytes: Dying(self.path))
    raised = 0
    for Dying.last in range(20):
        Dying.reads = 0
        try:
            assert len(list(read(Range(file)))) == 1000
        except OSError as error:
            raised += 1
            assert error.errno == 5 and error.filename == str(file.path)
    assert 1 < raised < 20


def test_sizes_come_from_the_footer(tmp_path: Path) -> None:
    columns = {"text": [f"{i:05d}" + "a" * 95 for i in range(10_000)], "address": ["b" * 500] * 10_000}
    file = _file(tmp_path / "a.parquet", pa.table(columns))
    size = total_plain_bytes([file])
    assert size == pytest.approx(1_040_000, rel=0.02) and file.bytes < size / 4, "the other column does not count"
    assert sum(item.bytes for item in _items(file)) == pytest.approx(size, rel=0.05)


def _peak_mb(path: Path) -> tuple[int, float]:
    """Characters of a file's texts, and the peak memory of a process that reads them, in MB."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom zerokara.corpus import find, read\n"
        "(file,) = find.find_files(sys.argv[1:], '')\n"
        "print(sum(len(item.text) for item in read.read(read.Range(file))))\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"  # getrusage has its parent's too
    )
    characters, peak = map(int, run_program(program, path).stdout.split())
    return characters, peak / 1024


@pytest.mark.parametrize("kind", ["a large row group", "repeated texts", "texts of dictionary type"])
def test_memory_stays_small(tmp_path: Path, kind: str) -> None:
    """A dictionary-encoded page of a few bytes can stand for any amount of text, as a hundred megabytes here."""
    is_large = kind == "a large row group"
    texts = [f"{i} " + "wörter " * 4000 for i in range(10)] * 400
    if is_large:
        texts = [f"{i} " + f"word {i % 100} " * 500 for i in range(20_000)]
    options = {"row_group_size": len(texts), "use_dictionary": not is_large}
    column = pa.array(texts, pa.string())
    column = column.dictionary_encode() if kind == "texts of dictionary type" else column
    small = _file(tmp_path / "small.parquet", pa.table({"text": texts[: 2000 if is_large else 50]}), **options)
    large = _file(tmp_path / "large.parquet", pa.table({"text": column}), **options)
    assert [item.text for item in read(Range(large)) if isinstance(item, Document)][-5:] == texts[-5:]
    (_, low), (characters, high) = _peak_mb(small.path), _peak_mb(large.path)
    assert characters == sum(map(len, texts)) and high < low + (30 if is_large else 45), (low, high)
