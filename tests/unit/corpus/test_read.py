"""Parts of corpus files → documents and bad lines: every line once in any format and cutting, every reason."""

import json
import tracemalloc
from pathlib import Path

import pytest
from corpus_files import COMPRESS, compressed, found, items_of, json_lines
from quiet_core import seconds_of

from zerokara.corpus import documents
from zerokara.corpus.documents import TxtDocument
from zerokara.corpus.read import BadLine, Document, Range, Reason, read, total_plain_bytes

Item = Document | BadLine


def _only(path: Path, content: bytes, txt_document: TxtDocument = "line") -> Item:
    path.write_bytes(content)
    (item,) = items_of(path, txt_document=txt_document)
    return item


ISO_2022_JP = "日本語".encode("iso2022_jp").decode("ascii")
BAD_JSON_LINES = {
    Reason.EMPTY_LINE: b"  \r\n",
    Reason.EMPTY_TEXT: b'{"text": " \\n\\u3000"}\n',
    Reason.BROKEN_JSON: b'{"text": "a"\n',
    Reason.SEVERAL_OBJECTS: b'{"text": "a"} , {"text": "b"}\n',
    Reason.ISO_2022: json_lines([ISO_2022_JP]),
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
    Reason.CR_ENDS: b"one\rtwo\n",
    Reason.ISO_2022: ISO_2022_JP.encode() + b"\n",
    Reason.TRUNCATED_LINE: "日本語".encode()[:-1],
    Reason.TOO_LONG: b"x" * 100 + b"\n",
}
OTHER_BAD_LINES = [
    ("jsonl", Reason.NUL, b"\0\0\0\0\0\n"),  # a hole that a crash left in the file
    ("jsonl", Reason.NUL, b'{"text": "a\0b"}\n'),
    ("jsonl", Reason.BROKEN_JSON, b'{"text": "a"},\n'),
    ("jsonl", Reason.EMPTY_TEXT, '{"text": "\ufeff"}\n'.encode()),
    ("txt", Reason.ISO_2022, "한국어".encode("iso2022_kr").removeprefix(b"\x1b$)C") + b"\n"),
    ("jsonl", Reason.TRUNCATED_LINE, '{"text": "日本"}'.encode()[:-4]),
]
CASES = [("jsonl", *case) for case in BAD_JSON_LINES.items()] + [("txt", *case) for case in BAD_TXT_LINES.items()]


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize(("kind", "reason", "line"), [*CASES, *OTHER_BAD_LINES])
def test_each_bad_line_is_put_aside_with_its_reason(
    tmp_path: Path, kind: str, reason: Reason, line: bytes, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 100)
    good = b'{"text": "good"}\n' if kind == "jsonl" else b"good\n"
    after = good if line.endswith(b"\n") else b""
    path = compressed(tmp_path / f"a.{kind}{ending}", good + line + after)
    for size in (1 << 20, 7):
        items = items_of(path, size)
        assert [item.text for item in items if isinstance(item, Document)] == ["good"] * (2 if after else 1)
        (bad,) = (item for item in items if isinstance(item, BadLine))
        assert (bad.reason, bad.offset) == (reason, len(good)) and len(bad.excerpt) <= 120
        assert size == 7 or bad.line == 2
        json.dumps(bad.excerpt).encode("utf-8")


def test_every_reason_has_its_case() -> None:
    """Damage is tested in test_compressed, test_blocks and test_tables, text without tokens in test_encode."""
    assert {*BAD_JSON_LINES, *BAD_TXT_LINES} == {*Reason} - {Reason.DAMAGED, Reason.NO_TOKENS}


def test_an_empty_file_is_as_harmless_as_an_empty_line() -> None:
    assert documents.text_of_file(b"") == (Reason.EMPTY_LINE, 0) and Reason.EMPTY_LINE in documents.HARMLESS


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'\xef\xbb\xbf{"text": "after a mark"}\n', "after a mark"),
        (b'{"text": "crlf"}\r\n', "crlf"),
        (b'{"text": "no newline at the end"}', "no newline at the end"),
        (b'{"text": "\\ufeffmarks\\n\\ufeffof joined\\ufefffiles"}\n', "marks\nof joined\ufefffiles"),
        (b'{"text": "Mac\\rOS"}\n', "Mac\rOS"),
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


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.jsonl.gz", "a.txt.gz", "a.jsonl.zst", "a.txt.zst"])
@pytest.mark.parametrize("finished", [True, False])
def test_parts_of_every_size_cover_each_line_once(tmp_path: Path, end: bytes, name: str, finished: bool) -> None:
    words = ["a", "日本語の行", "", "bb\u2028\u0085\x0b\x0cbb", "c" * 40, "", "d", "é" * 9, "last"]
    as_lines = [word if "txt" in name or not word else json.dumps({"text": word}) for word in words]
    content = b"".join(line.encode() + end for line in as_lines)
    path = compressed(tmp_path / name, content if finished else content.removesuffix(end))
    whole = items_of(path)
    assert [item.text for item in whole if isinstance(item, Document)] == [word for word in words if word]
    assert len(whole) == len(words)
    expected = [(type(item), item.offset) for item in whole]
    for size in range(1, len(content) + 2):
        cut = items_of(path, size)
        assert [(type(item), item.offset) for item in cut] == expected, size


def test_lines_of_a_range_are_counted_from_its_start(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthree\nfour\n")
    items = read(Range(found(tmp_path / "a.txt"), 4, 19), "text", "line")
    seen = [(item.line, item.offset, item.text) for item in items if isinstance(item, Document)]
    assert seen == [(1, 4, "two"), (2, 8, "three"), (3, 14, "four")]


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbfone\r\n\r\n two \n", "one\n\n two "),
        ("one\n\ufefftwo\ufeff\x0b\x0c\u2028\u0085".encode(), "one\ntwo\ufeff\x0b\x0c\u2028\u0085"),
        (b"one\rtwo\r", Reason.CR_ENDS),
        (b"one\n" + ISO_2022_JP.encode(), Reason.ISO_2022),
        (b" \n", Reason.EMPTY_TEXT),
        (b"\x93\xfa\x96\x7b", Reason.INVALID_UTF8),
        (b"a\0b", Reason.NUL),
        (b"x" * 101, Reason.TOO_LONG),
    ],
)
def test_whole_txt(tmp_path: Path, content: bytes, expected: str, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 100)
    path = compressed(tmp_path / f"a.txt{ending}", content)
    (item,) = items_of(path, 1, "file")
    assert (item.text if isinstance(item, Document) else item.reason) == expected
    if ending:
        path.write_bytes(path.read_bytes()[:-3])
        (item,) = items_of(path, 1, "file")
        assert isinstance(item, BadLine) and item.reason in (Reason.DAMAGED, Reason.TOO_LONG)


@pytest.mark.parametrize("ending", COMPRESS)
def test_reading_takes_little_memory(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 1 << 16)
    tiny, path = b'{"text": "a"}\n' * 20_000, tmp_path / f"a.jsonl{ending}"
    members = (tiny, b'{"text": "' + b"x" * 20_000_000 + b'"}\n', tiny)
    path.write_bytes(b"".join(COMPRESS[ending](part) for part in members))
    num_documents, bad = 0, []
    tracemalloc.start()
    for item in read(Range(found(path))):
        if isinstance(item, Document):
            num_documents += 1
        else:
            bad.append((item.reason, item.offset))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_documents == 40_000 and bad == [(Reason.TOO_LONG, len(tiny))] and peak < 8_000_000


@pytest.mark.parametrize("ending", COMPRESS)
def test_unpacked_sizes_are_guessed_from_the_head(tmp_path: Path, ending: str) -> None:
    content = b"".join(b'{"text": "document %d of many"}\n' % i for i in range(30_000))
    path = compressed(tmp_path / f"a.jsonl{ending}", content)
    assert total_plain_bytes([found(path)]) == pytest.approx(len(content), rel=0.1)
    path.write_bytes(b"".join(COMPRESS[ending](content[i : i + 3000]) for i in range(0, len(content), 3000)))
    assert total_plain_bytes([found(path)]) == pytest.approx(len(content), rel=0.1)


def test_a_bomb_is_not_unpacked_to_guess_its_size(tmp_path: Path) -> None:
    (tmp_path / "a.txt.zst").write_bytes(b"".join([COMPRESS[".zst"](bytes(20_000_000))] * 100))
    files = [found(tmp_path / "a.txt.zst")]
    assert seconds_of(lambda: total_plain_bytes(files)) < 1
    assert total_plain_bytes(files) >= 64_000_000
