"""Byte ranges → documents and bad lines: every line once, every reason, nothing lost."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random

import pytest

from zerokara.corpus import documents
from zerokara.corpus import read as read_module
from zerokara.corpus.compressed import zstd_module
from zerokara.corpus.documents import TxtDocument
from zerokara.corpus.find import find_files
from zerokara.corpus.read import BadLine, Document, Range, Reason, ranges, read
from zerokara.errors import UserError

Item = Document | BadLine


def _items(path: Path, target_bytes: int = 1 << 30, txt_document: TxtDocument = "line") -> list[Item]:
    files = find_files([str(path)], "")
    return [item for range_ in ranges(files, target_bytes, txt_document) for item in read(range_, "text", txt_document)]


def _only(path: Path, content: bytes, txt_document: TxtDocument = "line") -> Item:
    path.write_bytes(content)
    (item,) = _items(path, txt_document=txt_document)
    return item


BAD_JSON_LINES = {
    Reason.EMPTY_LINE: b"  \r\n",
    Reason.EMPTY_TEXT: b'{"text": " \\n\\u3000"}\n',
    Reason.BROKEN_JSON: b'{"text": "a"\n',
    Reason.NOT_AN_OBJECT: b'["text"]\n',
    Reason.MISSING_FIELD: b'{"body": "a"}\n',
    Reason.NULL: b'{"text": null}\n',
    Reason.WRONG_TYPE: b'{"text": 12}\n',
    Reason.LONE_SURROGATE: b'{"text": "a\\ud83d b"}\n',
    Reason.INVALID_UTF8: b'{"text": "a\xff\xfe"}\n',
    Reason.NUL: b'{"text": "a\\u0000b"}\n',
    Reason.TRUNCATED_LINE: b'{"text": "the writer die',
    Reason.TOO_LONG: b'{"text": "' + b"x" * 100 + b'"}\n',
}


BAD_TXT_LINES = {
    Reason.EMPTY_LINE: b" \t\r\n",
    Reason.INVALID_UTF8: "日本語\n".encode("shift_jis"),
    Reason.NUL: b"a\0b\n",
    Reason.TRUNCATED_LINE: "日本語".encode()[:-1],
    Reason.TOO_LONG: b"x" * 100 + b"\n",
}
CASES = [("jsonl", *case) for case in BAD_JSON_LINES.items()] + [("txt", *case) for case in BAD_TXT_LINES.items()]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize(("kind", "reason", "line"), CASES, ids=[f"{case[0]}-{case[1].name}" for case in CASES])
def test_each_bad_line_is_put_aside_with_its_reason(
    tmp_path: Path, kind: str, reason: Reason, line: bytes, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 100)
    good = b'{"text": "good"}\n' if kind == "jsonl" else b"good\n"
    after = good if line.endswith(b"\n") else b""
    path = tmp_path / f"a.{kind}{ending}"
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstd_module().compress}[ending]
    path.write_bytes(pack(good + line + after))
    for size in (1 << 20, 7):
        items = _items(path, size)
        assert [item.text for item in items if isinstance(item, Document)] == ["good"] * (2 if after else 1)
        (bad,) = (item for item in items if isinstance(item, BadLine))
        assert (bad.reason, bad.offset) == (reason, len(good))
        assert size == 7 or bad.line == 2
        json.dumps(bad.excerpt).encode("utf-8")


def test_every_reason_has_its_case() -> None:
    """Damage has its tests in test_packed, test_streams and test_tables; text without tokens is step 2's to see."""
    assert {*BAD_JSON_LINES, *BAD_TXT_LINES} == {*Reason} - {Reason.DAMAGED, Reason.NO_TOKENS}


@pytest.mark.parametrize(
    "line",
    [
        b"\0\0\0\0\0\n",  # a hole that a crash left in the file
        b'{"text": "a\0b"}\n',
    ],
)
def test_raw_nul_bytes(tmp_path: Path, line: bytes) -> None:
    item = _only(tmp_path / "a.jsonl", line)
    assert isinstance(item, BadLine) and item.reason is Reason.NUL


def test_half_a_character_at_the_end_of_the_file_is_a_truncated_line(tmp_path: Path) -> None:
    content = '{"text": "日本"}'.encode()[:-4]
    for name in ("a.jsonl", "a.txt"):
        item = _only(tmp_path / name, content)
        assert isinstance(item, BadLine) and item.reason is Reason.TRUNCATED_LINE


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'\xef\xbb\xbf{"text": "after a mark"}\n', "after a mark"),
        (b'{"text": "crlf"}\r\n', "crlf"),
        (b'{"text": "no newline at the end"}', "no newline at the end"),
        ('{"text": "a\u2028b\u2029c\u0085d"}\n'.encode(), "a\u2028b\u2029c\u0085d"),
        (b'{"text": "\\ud83d\\ude00", "id": 1}\n', "\U0001f600"),
        (b'{"text": "kept", "score": NaN, "big": 123456789012345678901234567890}\n', "kept"),
        (b'{"text": "kept", "title": "\\ud800"}\n', "kept"),
        (b'{"score": ' + b"-" + b"7" * 10_000 + b', "text": "kept"}\n', "kept"),
        (b'{"score": 1e999, "exact": 0.' + b"3" * 10_000 + b', "text": "kept"}\n', "kept"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b', "text": "kept"}\n', "kept"),
        (b'{"text": "first", "text": "last"}\n', "last"),
        (b'{"text": "first", "big": 1e999, "n": NaN, "text": "last"}\n', "last"),
        (b'{"text": " spaces and\\ttabs \\r\\n stay "}\n', " spaces and\ttabs \r\n stay "),
    ],
)
def test_what_is_odd_but_right_is_read(tmp_path: Path, line: bytes, text: str) -> None:
    item = _only(tmp_path / "a.jsonl", line)
    assert isinstance(item, Document) and item.text == text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": ' + b"7" * 10_000 + b"}\n", Reason.WRONG_TYPE),
        (b'{"text": "a", "b": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n", Reason.BROKEN_JSON),
        (b'{"text": "a", "b": ' + b"[" * 200_000, Reason.TRUNCATED_LINE),
    ],
)
def test_long_numbers_and_depths_beyond_a_thousand_have_a_reason(tmp_path: Path, line: bytes, reason: Reason) -> None:
    item = _only(tmp_path / "a.jsonl", line)
    assert isinstance(item, BadLine) and item.reason is reason


@pytest.mark.parametrize("gzipped", [False, True])
def test_an_over_long_line_is_put_aside_and_the_next_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gzipped: bool
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(read_module, "BUFFER_BYTES", 64)
    exactly = b'{"text": "' + b"x" * 87 + b'"}\n'
    assert len(exactly) == 100
    content = exactly + b'{"text": "' + b"y" * 500 + b'"}\n' + b'{"text": "next"}\n'
    path = tmp_path / ("a.jsonl.gz" if gzipped else "a.jsonl")
    path.write_bytes(gzip.compress(content) if gzipped else content)
    first, long, last = _items(path)
    assert isinstance(first, Document) and isinstance(last, Document) and last.text == "next"
    assert isinstance(long, BadLine) and long.reason is Reason.TOO_LONG and len(long.excerpt) <= 120
    assert last.offset == content.index(b'{"text": "next')


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize("finished", [True, False])
def test_ranges_of_every_size_cover_each_line_once(tmp_path: Path, end: bytes, name: str, finished: bool) -> None:
    words = ["a", "日本語の行", "", "bb\u2028bb", "c" * 40, "", "d", "é" * 9, "last"]
    as_lines = [word if name == "a.txt" or not word else json.dumps({"text": word}) for word in words]
    content = b"".join(line.encode() + end for line in as_lines)
    path = tmp_path / name
    path.write_bytes(content if finished else content.removesuffix(end))
    whole = _items(path)
    assert [item.text for item in whole if isinstance(item, Document)] == [word for word in words if word]
    assert len(whole) == len(words)
    expected = [(type(item), item.offset) for item in whole]
    for size in range(1, len(content) + 2):
        cut = _items(path, size)
        assert [(type(item), item.offset) for item in cut] == expected, size


def test_lines_of_a_range_are_counted_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nthree\nfour\n")
    (file,) = find_files([str(path)], "")
    items = list(read(Range(file, 4, 19), "text", "line"))
    assert [(item.line, item.offset, item.text) for item in items if isinstance(item, Document)] == [
        (1, 4, "two"),
        (2, 8, "three"),
        (3, 14, "four"),
    ]


@pytest.fixture
def lines() -> list[bytes]:
    """Lines that do not pack away to nothing."""
    random = Random(1)
    return [json.dumps({"text": f"document {i} {random.random()}"}).encode() + b"\n" for i in range(3000)]


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_truncated_gz_keeps_what_can_be_read(tmp_path: Path, lines: list[bytes], share: float) -> None:
    packed = gzip.compress(b"".join(lines))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(packed[: int(len(packed) * share)])
    *documents, last = _items(path)
    assert isinstance(last, BadLine) and last.reason is Reason.DAMAGED and "ends in the middle" in last.excerpt
    assert all(isinstance(item, Document) for item in documents)
    assert len(documents) > len(lines) * share * 0.7 - 50


def test_a_gz_damaged_in_the_middle_or_at_its_checksum(tmp_path: Path, lines: list[bytes]) -> None:
    packed = gzip.compress(b"".join(lines))
    for place, at_least in ((len(packed) // 2, 1000), (len(packed) - 6, 2900)):
        damaged = bytearray(packed)
        damaged[place : place + 4] = b"\xff\xff\xff\xff"
        (tmp_path / "a.jsonl.gz").write_bytes(damaged)
        *documents, last = _items(tmp_path / "a.jsonl.gz")
        assert isinstance(last, BadLine) and last.reason is Reason.DAMAGED
        assert sum(isinstance(item, Document) for item in documents) > at_least


def test_a_gz_of_several_members_empty_ones_and_padding(tmp_path: Path, lines: list[bytes]) -> None:
    packed = b"".join(
        [gzip.compress(b"".join(lines[:1000])), gzip.compress(b""), gzip.compress(b"".join(lines[1000:]))]
    )
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(packed + b"\0" * 500)
    assert len([item for item in _items(path) if isinstance(item, Document)]) == len(lines)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="the corpus is empty"):
        _items(path)


def test_a_gz_that_is_none_and_a_damaged_txt(tmp_path: Path) -> None:
    for name, content in (("b.jsonl.gz", b'{"text": "a"}\n'), ("c.txt.gz", gzip.compress(b"a text")[:-3])):
        (tmp_path / name).write_bytes(content)
        (last,) = _items(tmp_path / name, txt_document="file")
        assert isinstance(last, BadLine) and last.reason is Reason.DAMAGED


def test_txt_as_one_document(tmp_path: Path) -> None:
    item = _only(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\n\r\n two \n", "file")
    assert isinstance(item, Document) and item.text == "one\n\n two "
    assert ranges(find_files([str(tmp_path / "a.txt")], ""), 1, "file")[0].end is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b" \n", Reason.EMPTY_TEXT), (b"\x93\xfa\x96\x7b", Reason.INVALID_UTF8), (b"a\0b", Reason.NUL)],
)
def test_txt_that_is_no_document(tmp_path: Path, content: bytes, reason: Reason) -> None:
    item = _only(tmp_path / "a.txt", content, "file")
    assert isinstance(item, BadLine) and item.reason is reason


def test_txt_longer_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 10)
    item = _only(tmp_path / "a.txt", b"12345678901", "file")
    assert isinstance(item, BadLine) and item.reason is Reason.TOO_LONG


def test_txt_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n two \n\x93\xfa\nlast")
    items = _items(path)
    assert [item.text if isinstance(item, Document) else item.reason for item in items] == [
        "one",
        Reason.EMPTY_LINE,
        " two ",
        Reason.INVALID_UTF8,
        "last",
    ]
