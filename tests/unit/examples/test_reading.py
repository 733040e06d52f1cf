"""Files of examples → records with their places, whatever the format; what is no record is told with its place."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from configs import fault_of

from zerokara.base.errors import UserError
from zerokara.corpus.compressed import zstd_module
from zerokara.corpus.find import CORPUS, TABLES, find_files
from zerokara.examples.formats import Record, read_records


def items(path: Path) -> list[Record]:
    (file,) = find_files([str(path)], "here", TABLES)
    return list(read_records(file))


def values(path: Path) -> list[dict[str, object]]:
    return [item.values for item in items(path) if not item.reason]


def reasons(path: Path) -> dict[int, str]:
    return {item.line: item.reason for item in items(path) if item.reason}


TSV = '\ufeffid\tdocument\tlabel\r\n1\t"so good\t1\n\r\n2\ta "b" \\t\'c\t0'


@pytest.mark.parametrize("name", ["x.tsv", "x.txt", "x.tsv.gz", "x.txt.zst"])
def test_quotes_in_a_table_are_plain_a_byte_order_mark_and_crlf_no_part(tmp_path: Path, name: str) -> None:
    pack = {"gz": gzip.compress, "zst": zstd_module().compress}.get(name.split(".")[-1], bytes)
    (tmp_path / name).write_bytes(pack(TSV.encode()))
    assert values(tmp_path / name) == [
        {"id": "1", "document": '"so good', "label": "1"},
        {"id": "2", "document": 'a "b" \\t\'c', "label": "0"},
    ]
    first = items(tmp_path / name)[0]
    assert first.place == f"{tmp_path / name}:2" and first.offset == TSV.encode().index(b"1\t")


def test_bad_lines_of_a_table_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_bytes(b"a\tb\n1\t2\t3\n\n1\n\xff\t2\n1\t\x00\n5\t6\n")
    assert reasons(tmp_path / "x.tsv") == {
        2: "3 columns instead of 2",
        4: "1 column instead of 2",
        5: "invalid UTF-8",
        6: "NUL character",
    }
    assert values(tmp_path / "x.tsv") == [{"a": "5", "b": "6"}]


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"only text\n", ["no tab"]),
        (b"a\ta\n", ["'a' twice"]),
        ("번호\t글\t표\n".encode("euc-kr"), ["names the columns", "invalid UTF-8", "save the file as UTF-8"]),
        (b"a\0\tb\n", ["names the columns", "NUL", "mend"]),
    ],
)
def test_a_table_needs_readable_names_of_its_columns(tmp_path: Path, head: bytes, said: list[str]) -> None:
    """Else the first row would become the names, and none of it an example."""
    (tmp_path / "x.tsv").write_bytes(b"\n" + head + b"1\tgood\t1\n")
    fault = fault_of(items, tmp_path / "x.tsv")
    assert fault.where == f"{tmp_path / 'x.tsv'}:2" and all(part in str(fault) for part in said)


def test_rows_of_parquet_with_lists_and_broken_strings(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]]
    pq.write_table(pa.table({"messages": turns}), tmp_path / "x.parquet")
    assert values(tmp_path / "x.parquet") == [{"messages": turns[0]}]
    broken = pa.array([b"good", b"\xff", b"fine"])
    pq.write_table(pa.table({"a": broken.cast(pa.string(), safe=False)}), tmp_path / "y.parquet")
    assert values(tmp_path / "y.parquet") == [{"a": "good"}, {"a": "fine"}]
    assert reasons(tmp_path / "y.parquet") == {2: "invalid UTF-8"}


@pytest.mark.parametrize(
    ("name", "content"), [("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000)[:-10]), ("x.parquet", b"PAR1 and no more")]
)
def test_a_damaged_file_is_an_error(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match="is damaged") as caught:
        items(tmp_path / name)
    assert caught.value.faults[0].where == str(tmp_path / name)


def test_a_corpus_takes_no_tables(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text(TSV, encoding="utf-8")
    for formats, path in ((CORPUS, tmp_path / "x.tsv"), (TABLES, Path(__file__))):
        with pytest.raises(UserError, match="format"):
            find_files([str(path)], "here", formats)
