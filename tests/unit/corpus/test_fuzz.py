"""Random bytes mixed into good lines: counts always close, and the good lines always come out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from zerokara.corpus.compressed import zstd_module
from zerokara.corpus.documents import BadLine, Document, Reason
from zerokara.corpus.find import find_files
from zerokara.corpus.read import parts, read

zstd: ModuleType = zstd_module()
ALPHABETS = [
    "abc xyz",
    "日本語テキスト",
    "한국어 문장",
    "ăîșț âÎ",
    "😀👩‍👩‍👧",
    'quote " back \\ slash / tab\t',
    "\u2028\u0085\x7f",
]
NUM_SEEDS = 120


def _good_line(random: Random, number: int) -> tuple[bytes, str]:
    text = f"{number}:" + "".join(random.choices(random.choice(ALPHABETS), k=random.randrange(60)))
    record: dict[str, object] = {"id": number, "text": text, "x": random.random()}
    line = json.dumps(record, ensure_ascii=random.random() < 0.5)
    return line.encode() + random.choice([b"\n", b"\n", b"\r\n"]), text


def _bad_line(random: Random) -> bytes:
    """A line that is no document: a good one spoilt, or raw bytes; it holds no line end inside."""
    how = random.randrange(6)
    if how == 0:
        line = bytearray(random.randbytes(random.randrange(1, 200)))
    else:
        line = bytearray(_good_line(random, -1)[0].rstrip(b"\r\n"))
        for _ in range(random.randrange(1, 6)):
            place = random.randrange(len(line))
            if how == 1:  # mutation
                line[place] = random.randrange(256)
            elif how == 2:  # insertion
                line[place:place] = random.randbytes(random.randrange(1, 20))
            elif how == 3:  # deletion
                del line[place : place + random.randrange(1, 20)]
            elif how == 4:  # truncation
                del line[max(1, place) :]
            else:
                line = bytearray(random.choice([b"", b"{}", b"[1]", b"null", b"7", b'{"text": 3}', b'{"text": ""}']))
            if not line:
                break
    return bytes(line).replace(b"\n", b"?") + b"\n"


def _corpus(random: Random) -> tuple[bytes, list[bytes], dict[int, str]]:
    """The content, its lines, and the text of each good line by its number from 1."""
    lines: list[bytes] = []
    texts: dict[int, str] = {}
    for number in range(1, random.randrange(2, 60)):
        if random.random() < 0.6:
            line, texts[number] = _good_line(random, number)
            lines.append(line)
        else:
            lines.append(_bad_line(random))
    if random.random() < 0.5:  # a writer that died
        lines[-1] = lines[-1][: random.randrange(1, len(lines[-1]) + 1)]
        texts.pop(len(lines), None)
    return b"".join(lines), lines, texts


def _read(path: Path, size: int) -> list[Document | BadLine]:
    (file,) = find_files([str(path)], "")
    return [item for part in parts([file], size, "line") for item in read(part, "text", "line")]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_counts_close_and_good_lines_come_out(tmp_path: Path, ending: str) -> None:
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}[ending]
    for seed in range(NUM_SEEDS):
        random = Random(seed)
        content, lines, texts = _corpus(random)
        path = tmp_path / f"a.jsonl{ending}"
        path.write_bytes(pack(content))
        for size in (1 << 20, random.randrange(1, 50), random.randrange(50, 2000)):
            items = _read(path, size)
            assert len(items) == len(lines), f"seed {seed}, size {size}"
            for number, text in texts.items():
                item = items[number - 1]
                assert isinstance(item, Document) and item.text == text, f"seed {seed}, size {size}, line {number}"
            for item in items:
                told = item.text if isinstance(item, Document) else item.excerpt
                told.encode("utf-8")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_everything_before_damage_comes_out(tmp_path: Path, ending: str) -> None:
    pack = gzip.compress if ending == ".gz" else zstd.compress
    for seed in range(NUM_SEEDS):
        random = Random(seed)
        content, lines, texts = _corpus(random)
        half = random.randrange(len(content) + 1)
        whole, last = pack(content[:half]), pack(content[half:])
        # The header of the last member is spoilt, or it is cut off: what stands before it is whole.
        last = random.choice([b"\xff" + last[1:], random.randbytes(20), last[: random.randrange(1, len(last))]])
        path = tmp_path / f"a.jsonl{ending}"
        path.write_bytes(whole + last)
        expected = _read(path, 1 << 20)
        assert [item.reason for item in expected if isinstance(item, BadLine)].count(Reason.DAMAGED) == 1, seed
        before = content[:half].count(b"\n")
        assert len(expected) > before and len(expected) <= len(lines) + 1, f"seed {seed}"
        for number, text in texts.items():
            if number <= before:
                item = expected[number - 1]
                assert isinstance(item, Document) and item.text == text, f"seed {seed}, line {number}"
        cut = _read(path, random.randrange(1, 300))
        assert [item._replace(line=0) for item in cut] == [item._replace(line=0) for item in expected], f"seed {seed}"
