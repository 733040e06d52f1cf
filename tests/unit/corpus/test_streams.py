"""Ranges of packed files: their union is the whole file, for every block size, with and without an open stream."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from zerokara.corpus import documents, packed
from zerokara.corpus.inputs import InputFile, find_files
from zerokara.corpus.packed import Packing, zstd_module
from zerokara.corpus.reading import BadLine, Document, OpenStreams, Range, Reason, has_unknown_size, ranges, read

zstd: ModuleType = zstd_module()
PACK = {"gzip": gzip.compress, "zstd": zstd.compress}
ENDING = {"gzip": ".gz", "zstd": ".zst"}
PACKINGS: list[Packing] = ["gzip", "zstd"]
WORDS = ["a", "日本語の行", "", "bb\u2028bb", "c" * 40, "", "d", "é" * 9, "last"]

Seen = list[tuple[object, ...]]


def _seen(item: Document | BadLine) -> tuple[object, ...]:
    return (item.offset, item.text if isinstance(item, Document) else item.reason)


def _whole(file: InputFile) -> Seen:
    reader = read(Range(file), "text", "line")
    seen = [_seen(item) for item in reader]
    assert reader.at_end
    return seen


def _by_blocks(file: InputFile, size: int, streams: OpenStreams | None) -> Seen:
    """What step 2 does: blocks one after another until a reader is at the end, and one more for good measure."""
    seen: Seen = []
    start, disk_bytes, ends = 0, 0, 0
    while ends < 2:
        reader = read(Range(file, start, start + size), "text", "line", streams)
        items = list(reader)
        seen += [_seen(item) for item in items]
        assert [item.line for item in items] == list(range(1, len(items) + 1))
        assert ends == 0 or (not items and reader.at_end)
        ends += reader.at_end
        disk_bytes += reader.disk_bytes
        start += size
        assert start < 100_000 + 10 * size
    if streams:
        assert disk_bytes == pytest.approx(file.bytes, abs=1)
    return seen


def _file(path: Path, content: bytes) -> InputFile:
    path.write_bytes(content)
    (file,) = find_files([str(path)], "")
    return file


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
@pytest.mark.parametrize("finished", [True, False])
def test_blocks_of_every_size_cover_each_line_once(tmp_path: Path, packing: Packing, kind: str, finished: bool) -> None:
    as_lines = [word if kind == "txt" or not word else json.dumps({"text": word}) for word in WORDS]
    content = "".join(line + "\n" for line in as_lines).encode()
    content = content if finished else content.removesuffix(b"\n")
    file = _file(tmp_path / f"a.{kind}{ENDING[packing]}", PACK[packing](content))
    assert has_unknown_size(file, "line")
    whole = _whole(file)
    assert [text for _, text in whole if not isinstance(text, Reason)] == [word for word in WORDS if word]
    for size in range(1, len(content) + 3):
        with OpenStreams() as streams:
            assert _by_blocks(file, size, streams) == whole, size
        assert _by_blocks(file, size, None) == whole, size


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", ["cut", "spoilt", "cut at a line's end"])
def test_blocks_of_a_damaged_file_tell_the_damage_once(
    tmp_path: Path, packing: Packing, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 60)
    random = Random(2)
    lines = [json.dumps({"text": f"{i} " + random.randbytes(random.randrange(40)).hex()}) for i in range(40)]
    content = "".join(line + "\n" for line in lines).encode()
    whole_members = PACK[packing](content[:1500])
    content_end = content.index(b"\n", 1600) + 1
    last = PACK[packing](content[1500:] if kind != "cut at a line's end" else content[1500:content_end])
    last = {"cut": last[: len(last) * 2 // 3], "spoilt": last[: len(last) // 2] + b"\xff" * 40}.get(kind, last[:-2])
    file = _file(tmp_path / f"a.jsonl{ENDING[packing]}", whole_members + last)
    whole = _whole(file)
    assert [reason for _, reason in whole].count(Reason.DAMAGED) == 1 and whole[-1][1] is Reason.DAMAGED
    good = [text for _, text in whole if not isinstance(text, Reason)]
    expected = [json.loads(line)["text"] for line in lines if len(line) + 1 <= 60]
    assert len(good) > 10
    assert good == expected[: len(good)] or kind == "spoilt"  # zlib makes up bytes before it sees the damage
    for size in [*range(1, 200), 1000, len(content), 2 * len(content)]:
        with OpenStreams() as streams:
            assert _by_blocks(file, size, streams) == whole, size
        assert _by_blocks(file, size, None) == whole, size


def test_a_cut_off_line_that_is_too_long_is_told_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 100)
    content = b'{"text": "good"}\n' + b'{"text": "' + Random(3).randbytes(20_000).hex().encode()
    packed_bytes = gzip.compress(content)
    file = _file(tmp_path / "a.jsonl.gz", packed_bytes[:-100])
    whole = _whole(file)
    assert whole == [(0, "good"), (17, Reason.DAMAGED)]
    for size in (1, 10, 16, 17, 18, 5000, 39_000, 50_000):
        with OpenStreams() as streams:
            assert _by_blocks(file, size, streams) == whole


def test_a_line_that_is_too_long_before_the_damage_is_told_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 100)
    content = b'{"text": "a"}\n' + b"x" * 500 + b'\n{"text": "b"}\n'
    file = _file(tmp_path / "a.jsonl.gz", gzip.compress(content)[:-4])
    assert [seen[1] for seen in _whole(file)] == ["a", Reason.TOO_LONG, "b", Reason.DAMAGED]


def test_two_workers_that_share_the_blocks_read_all(tmp_path: Path) -> None:
    content = b"".join(b'{"text": "%d"}\n' % i for i in range(500))
    file = _file(tmp_path / "a.jsonl.zst", zstd.compress(content))
    workers, random, seen = (OpenStreams(), OpenStreams()), Random(4), []
    for start in range(0, len(content) + 100, 100):
        streams = workers[random.randrange(2)]
        seen += [_seen(item) for item in read(Range(file, start, start + 100), "text", "line", streams)]
    for streams in workers:
        streams.close()
    assert seen == _whole(file)


def test_an_open_stream_goes_on_and_a_range_before_it_reopens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Packing] = []
    begin = packed.PackedReader.__init__

    def counted(self: packed.PackedReader, raw: object, packing: Packing, name: str) -> None:
        opened.append(packing)
        begin(self, raw, packing, name)  # type: ignore[arg-type]

    monkeypatch.setattr(packed.PackedReader, "__init__", counted)
    file = _file(tmp_path / "a.txt.gz", gzip.compress(b"one\ntwo\nthree\nfour\nfive\n"))
    other = _file(tmp_path / "b.txt.gz", gzip.compress(b"other\n"))
    with OpenStreams() as streams:

        def texts(which: InputFile, start: int, end: int) -> list[object]:
            return [_seen(item)[1] for item in read(Range(which, start, end), "text", "line", streams)]

        assert texts(file, 0, 5) == ["one", "two"] and texts(file, 5, 9) == ["three"] and len(opened) == 1
        assert texts(file, 15, 99) == ["five"] and len(opened) == 1  # skips "four"
        assert texts(file, 4, 8) == ["two"] and len(opened) == 2  # goes back
        assert texts(other, 0, 9) == ["other"] and len(opened) == 3
        assert texts(file, 8, 14) == ["three"] and len(opened) == 4


def test_a_reading_given_up_half_way_leaves_no_stream(tmp_path: Path) -> None:
    file = _file(tmp_path / "a.txt.gz", gzip.compress(b"one\ntwo\nthree\n"))
    with OpenStreams() as streams:
        items = iter(read(Range(file, 0, 100), "text", "line", streams))
        next(items)
        items.close()  # type: ignore[attr-defined]  # it is a generator
        assert [_seen(item)[1] for item in read(Range(file, 4, 100), "text", "line", streams)] == ["two", "three"]


def test_what_is_cut_and_what_has_unknown_size(tmp_path: Path) -> None:
    packed_lines = _file(tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99))
    packed_text = _file(tmp_path / "a.txt.zst", zstd.compress(b"a\n" * 99))
    plain = _file(tmp_path / "a.jsonl", b'{"text": "a"}\n' * 99)
    assert has_unknown_size(packed_lines, "file") and has_unknown_size(packed_text, "line")
    assert not has_unknown_size(packed_text, "file") and not has_unknown_size(plain, "line")
    assert ranges([packed_lines, packed_text], 1, "file") == [Range(packed_lines), Range(packed_text)]
    assert Range(packed_lines).bytes == packed_lines.bytes and Range(packed_lines, 0, 100).bytes == 0
    cut = ranges([plain], 100, "file")
    assert len(cut) == 14 and sum(part.bytes for part in cut) == plain.bytes
    ends = []
    for part in cut:
        reader = read(part)
        list(reader)
        ends.append(reader.at_end)
        assert reader.disk_bytes == part.bytes
    assert ends == [False] * 13 + [True]
