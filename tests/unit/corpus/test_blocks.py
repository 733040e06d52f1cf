"""Blocks of compressed files: their union is the whole file for any size of a block; a damage is told once."""

import json
import pickle
from pathlib import Path
from random import Random

import pytest
from corpus_files import COMPRESS, found

from zerokara.corpus import documents
from zerokara.corpus.find import InputFile
from zerokara.corpus.read import BadLine, Block, Document, Reason, blocks, read

ENDINGS = [".gz", ".zst"]

Seen = list[tuple[object, ...]]


def _seen(item: Document | BadLine) -> tuple[object, ...]:
    return (item.line, item.offset, item.bytes, item.text if isinstance(item, Document) else item.reason)


def _by_blocks(file: InputFile, size: int) -> Seen:
    """The items of all blocks, which follow one another without a gap."""
    parts: list[Block] = [pickle.loads(pickle.dumps(block)) for block in blocks(file, size)]
    assert [block.is_last for block in parts] == [False] * (len(parts) - 1) + [True]
    assert sum(block.disk_bytes for block in parts) == file.bytes and min(block.disk_bytes for block in parts) >= 0
    position, line = 0, 1
    for block in parts:
        assert (block.start, block.first_line) == (position, line)
        assert len(block.content) < size + documents.MAX_LINE_BYTES
        items = list(read(block, "text", "line"))
        position, line = position + sum(item.bytes for item in items), line + len(items)
    return [_seen(item) for block in parts for item in read(block, "text", "line")]


def _contents(seen: Seen) -> list[object]:
    return [what for *_, what in seen]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", ["cut", "spoilt", "cut at a line's end"])
def test_blocks_tell_a_damage_once(tmp_path: Path, ending: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 60)
    random = Random(2)
    lines = [json.dumps({"text": f"{i} " + random.randbytes(random.randrange(40)).hex()}) for i in range(40)]
    content = "".join(line + "\n" for line in lines).encode()
    whole_members = COMPRESS[ending](content[:1500])
    content_end = content.index(b"\n", 1600) + 1
    last = COMPRESS[ending](content[1500:] if kind != "cut at a line's end" else content[1500:content_end])
    last = {"cut": last[: len(last) * 2 // 3], "spoilt": last[: len(last) // 2] + b"\xff" * 40}.get(kind, last[:-2])
    file = found(tmp_path / f"a.jsonl{ending}", whole_members + last)
    whole = _by_blocks(file, 1 << 20)
    seen = _contents(whole)
    assert seen.count(Reason.DAMAGED) == 1 and seen[-1] is Reason.DAMAGED
    good = [text for text in seen if not isinstance(text, Reason)]
    expected = [json.loads(line)["text"] for line in lines if len(line) + 1 <= 60]
    assert len(good) > 10
    assert good == expected[: len(good)] or kind == "spoilt"  # zlib makes up bytes before it sees the damage
    for size in [*range(1, 200), 1000, len(content), 2 * len(content)]:
        assert _by_blocks(file, size) == whole, size


@pytest.mark.parametrize("ending", ENDINGS)
def test_lines_too_long_cost_themselves_alone(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 100)
    long = Random(3).randbytes(300_000).hex().encode()
    content = b'{"text": "a"}\n' + b'{"text": "' + long + b'"}\n{"text": "b"}\n'
    packed_bytes = COMPRESS[ending](content)
    file = found(tmp_path / f"a.jsonl{ending}", packed_bytes)
    cut = found(tmp_path / f"b.jsonl{ending}", packed_bytes[:-100])
    ends = found(tmp_path / f"c.jsonl{ending}", COMPRESS[ending](content[:-14]) + b"garbage")
    for size in (1, 13, 14, 15, 200, 5000, 700_000):
        assert _contents(_by_blocks(file, size)) == ["a", Reason.TOO_LONG, "b"]
        assert max(len(block.content) for block in blocks(file, size)) < size + 100
        assert _contents(_by_blocks(cut, size))[:1] == ["a"]
        assert _contents(_by_blocks(ends, size)) == ["a", Reason.TOO_LONG, Reason.DAMAGED]
    (bad,) = (block.last for block in blocks(file, 1) if block.last)
    assert bad.bytes == len(long) + 13 and bad.excerpt.startswith('{"text": "')
    assert file.bytes // 2 < bad.lost_bytes <= file.bytes


def test_a_cut_off_line_that_is_too_long_is_told_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 100)
    content = b'{"text": "good"}\n' + b'{"text": "' + Random(3).randbytes(20_000).hex().encode()
    file = found(tmp_path / "a.jsonl.gz", COMPRESS[".gz"](content)[:-100])
    for size in (1, 10, 16, 17, 18, 5000, 39_000, 50_000):
        assert _contents(_by_blocks(file, size)) == ["good", Reason.DAMAGED]


def test_an_empty_file_and_one_of_another_format_are_damaged(tmp_path: Path) -> None:
    file = found(tmp_path / "a.jsonl.gz", b'{"text": "a"}\n')
    (block,) = blocks(file, 1000)
    assert block.is_last and block.content == b"" and block.last and block.last.lost_bytes == file.bytes
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    (block,) = blocks(file, 1000)
    assert block.is_last and block.last and "empty" in block.last.excerpt
