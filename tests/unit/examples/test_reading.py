"""Files of examples → records with their places, whatever the format; what is no record is told with its place."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zerokara.corpus.compressed import zstd_module
from zerokara.errors import UserError
from zerokara.examples.formats import Record, find_example_files, read_records


def items(path: Path) -> list[Record]:
    (file,) = find_example_files([str(path)], "here")
    return list(read_records(file))


def values(path: Path) -> list[dict[str, object]]:
    return [item.values for item in items(path) if not item.reason]


def reasons(path: Path) -> dict[int, str]:
    return {item.line: item.reason for item in items(path) if item.reason}


TSV = 'id\tdocument\tlabel\n1\t"so good\t1\n2\ta "b" \\t\'c\t0\n'


@pytest.mark.parametrize("name", ["x.tsv", "x.txt", "x.tsv.gz", "x.txt.zst"])
def test_quotes_in_a_table_are_plain_characters(tmp_path: Path, name: str) -> None:
    pack = {"gz": gzip.compress, "zst": zstd_module().compress}.get(name.split(".")[-1], bytes)
    (tmp_path / name).write_bytes(pack(TSV.encode()))
    assert values(tmp_path / name) == [
        {"id": "1", "document": '"so good', "label": "1"},
        {"id": "2", "document": 'a "b" \\t\'c', "label": "0"},
    ]
    first = items(tmp_path / name)[0]
    assert first.line == 2 and first.offset == TSV.index("1\t")
    assert first.place == f"{tmp_path / name}:2"


def test_a_byte_order_mark_and_crlf_are_no_part_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_bytes(b"\xef\xbb\xbfa\tb\r\n1\t2\r\n\r\n3\t4")
    assert values(tmp_path / "x.tsv") == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]


def test_bad_lines_of_a_table_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_bytes(b"a\tb\n1\t2\t3\n\n1\n\xff\t2\n1\t\x00\n5\t6\n")
    assert reasons(tmp_path / "x.tsv") == {
        2: "3 columns instead of 2",
        4: "1 columns instead of 2",
        5: "invalid UTF-8",
        6: "NUL character",
    }
    assert values(tmp_path / "x.tsv") == [{"a": "5", "b": "6"}]


@pytest.mark.parametrize(("text", "rule"), [("only text\nmore\n", "no tab"), ("a\ta\n1\t2\n", "'a' twice")])
def test_a_table_needs_names_of_its_columns(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=rule) as caught:
        items(tmp_path / "x.txt")
    assert caught.value.faults[0].where == f"{tmp_path / 'x.txt'}:1"


@pytest.mark.parametrize(
    ("names", "said"),
    [("번호\t글\t표\n".encode("euc-kr"), ["invalid UTF-8", "save the file as UTF-8"]), (b"a\0\tb\n", ["NUL", "mend"])],
)
def test_names_of_columns_that_cannot_be_read_are_an_error(tmp_path: Path, names: bytes, said: list[str]) -> None:
    """The first row would become the names, and none of it an example."""
    (tmp_path / "x.tsv").write_bytes(b"\n" + names + b"1\tgood\t1\n")
    with pytest.raises(UserError, match="names the columns") as caught:
        items(tmp_path / "x.tsv")
    assert caught.value.faults[0].where == f"{tmp_path / 'x.tsv'}:2" and all(part in str(caught.value) for part in said)


def test_bad_lines_of_json_are_told(tmp_path: Path) -> None:
    lines = [b'{"a": 1}', b"[1]", b'{"a": ', b"", b'{"a": "\\ud800"}', b'{"a": "\xff"}', b'{"a": NaN}', b"\x00"]
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    assert reasons(tmp_path / "x.jsonl") == {
        2: "not a JSON object",
        3: "broken JSON",
        5: "lone surrogate",
        6: "invalid UTF-8",
        8: "NUL character",
    }
    assert [item.line for item in items(tmp_path / "x.jsonl") if not item.reason] == [1, 7]


def test_rows_of_parquet_with_lists_and_broken_strings(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]]
    pq.write_table(pa.table({"messages": turns}), tmp_path / "x.parquet")
    assert values(tmp_path / "x.parquet") == [{"messages": turns[0]}]
    broken = pa.array([b"good", b"\xff", b"fine"])
    pq.write_table(pa.table({"a": broken.cast(pa.string(), safe=False)}), tmp_path / "y.parquet")
    assert values(tmp_path / "y.parquet") == [{"a": "good"}, {"a": "fine"}]
    assert reasons(tmp_path / "y.parquet") == {2: "invalid UTF-8"}


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"a": 1}\n' * 1000)
    (tmp_path / "x.jsonl.gz").write_bytes(packed[:-10])
    with pytest.raises(UserError, match="is damaged") as caught:
        items(tmp_path / "x.jsonl.gz")
    assert caught.value.faults[0].where == str(tmp_path / "x.jsonl.gz")
    (tmp_path / "y.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="is damaged"):
        items(tmp_path / "y.parquet")


def test_a_corpus_takes_no_tables(tmp_path: Path) -> None:
    from zerokara.corpus.find import find_files

    (tmp_path / "x.tsv").write_text(TSV, encoding="utf-8")
    with pytest.raises(UserError, match="format"):
        find_files([str(tmp_path / "x.tsv")], "here")
    with pytest.raises(UserError, match="format"):
        find_example_files([__file__], "here")
