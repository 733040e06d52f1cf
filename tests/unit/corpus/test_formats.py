"""The same text in any format gives the same documents, and odd amounts of it are read in little memory."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zerokara.corpus import documents
from zerokara.corpus import read as read_module
from zerokara.corpus.compressed import zstd_module
from zerokara.corpus.find import InputFile, find_files
from zerokara.corpus.read import (
    BadLine,
    Document,
    Range,
    Reason,
    bytes_before,
    parts,
    ranges,
    read,
    total_plain_bytes,
)

zstd: ModuleType = zstd_module()
TEXTS = [
    "one",
    "日本語の文。",
    " spaces\tand tabs ",
    "한국어 \u2028 separators \u0085",
    "ă î ș ț",
    "😀" * 50,
    "\ufeffmark inside",
] * 50
NAMES = ["a.jsonl", "a.json", "a.ndjson.gz", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt", "a.txt.gz", "a.txt.zst"]


def _write(path: Path, texts: list[str]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=30)
        return
    as_text = path.name.startswith("a.txt")
    lines = [text if as_text else json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    content = "".join(line + "\n" for line in lines).encode()
    pack = {".gz": gzip.compress, ".zst": zstd.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_text_in_any_format_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    _write(tmp_path / name, TEXTS)
    (file,) = find_files([str(tmp_path / name)], "")
    for size in (1000, 1 << 30):
        whole, cut = ranges([file], size, "line"), list(parts([file], size, "line"))
        for items in ([item for part in some for item in read(part, "text", "line")] for some in (whole, cut)):
            assert [item.text for item in items if isinstance(item, Document)] == TEXTS
            assert len(items) == len(TEXTS)
        assert sum(part.disk_bytes for part in cut) == file.bytes


def test_other_text_gives_other_documents(tmp_path: Path) -> None:
    """The control: one changed character shows in every format."""
    for name in NAMES:
        _write(tmp_path / name, [*TEXTS[:-1], TEXTS[-1] + "x"])
        (file,) = find_files([str(tmp_path / name)], "")
        texts = [item.text for item in read(Range(file), "text", "line") if isinstance(item, Document)]
        assert texts != TEXTS and texts[:-1] == TEXTS[:-1]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_many_tiny_documents_and_a_line_without_end_take_little_memory(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 1 << 16)
    tiny = b'{"text": "a"}\n' * 40_000
    pack = {"": bytes, ".gz": lambda text: gzip.compress(text, 1), ".zst": zstd.compress}[ending]
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(b"".join(pack(part) for part in (tiny, b'{"text": "' + b"x" * 20_000_000 + b'"}\n', tiny)))
    (file,) = find_files([str(path)], "")
    num_documents, bad = 0, []
    tracemalloc.start()
    for item in read(Range(file)):
        if isinstance(item, Document):
            num_documents += 1
        else:
            bad.append(item)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_documents == 80_000 and [item.reason for item in bad] == [Reason.TOO_LONG]
    assert bad[0].offset == len(tiny) and peak < 8_000_000


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_unpacked_sizes_are_guessed_from_the_head(tmp_path: Path, ending: str) -> None:
    content = b"".join(b'{"text": "document %d of many"}\n' % i for i in range(60_000))
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}[ending]
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(pack(content))
    (file,) = find_files([str(path)], "")
    assert total_plain_bytes([file]) == pytest.approx(len(content), rel=0.1)
    members = b"".join(pack(content[i : i + 3000]) for i in range(0, len(content), 3000))
    path.write_bytes(members)
    (file,) = find_files([str(path)], "")
    assert total_plain_bytes([file]) == pytest.approx(len(content), rel=0.1)
    *_, item = read(Range(file))
    assert bytes_before(item) == item.offset


def test_of_many_files_a_few_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = 0
    for number in range(200):
        content = b"".join(b'{"text": "document %d %d"}\n' % (i, number) for i in range(10 + number % 7))
        total += len(content)
        ending, pack = (".gz", gzip.compress) if number % 3 else ("", bytes)
        (tmp_path / f"{number:03}.jsonl{ending}").write_bytes(pack(content))
    (tmp_path / "empty.jsonl.gz").touch()
    files = find_files([str(tmp_path)], "")
    checked: list[InputFile] = []
    size_of = read_module._plain_bytes
    monkeypatch.setattr(read_module, "_plain_bytes", lambda file: checked.append(file) or size_of(file))
    assert total_plain_bytes(files) == pytest.approx(total, rel=0.1)
    assert len(checked) <= 32 and total_plain_bytes([]) == 0


def test_a_bomb_is_not_unpacked_to_guess_its_size(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"".join([zstd.compress(bytes(20_000_000))] * 100))
    (file,) = find_files([str(path)], "")
    started = time.process_time()
    assert total_plain_bytes([file]) >= 64_000_000
    assert time.process_time() - started < 1


def test_a_packed_text_as_one_document(tmp_path: Path) -> None:
    for name, pack in (("a.txt.gz", gzip.compress), ("a.txt.zst", zstd.compress)):
        (tmp_path / name).write_bytes(pack("\ufeffone\r\ntwo\n".encode()))
        (file,) = find_files([str(tmp_path / name)], "")
        (item,) = read(Range(file))
        assert isinstance(item, Document) and item.text == "one\ntwo"
        (tmp_path / name).write_bytes(pack(b"one")[:-2])
        (file,) = find_files([str(tmp_path / name)], "")
        (item,) = read(Range(file))
        assert isinstance(item, BadLine) and item.reason is Reason.DAMAGED
