"""Damaged .gz and .zst files, made at random: what another reader can read arrives, and the accounts close.

`ZEROKARA_FUZZ_FILES=1000 pytest tests/unit/tokens/test_damaged_files.py -s` damages a thousand files instead of a few.
The other readers are Python's `gzip` and zstd's own file object.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.compressed import zstd_module
from zerokara.corpus.documents import BadLine, Document, Reason
from zerokara.corpus.find import InputFile, find_files
from zerokara.corpus.read import Range, read
from zerokara.errors import UserError
from zerokara.tokens.accounts import SourceTally, check_bad_fraction
from zerokara.tokens.indexed import TokenPaths

zstd: ModuleType = zstd_module()
CHECKED = {zstd.CompressionParameter.checksum_flag: 1}
NUM_FILES = int(os.environ.get("ZEROKARA_FUZZ_FILES", "60"))
WORDS = ["the", "sea", "ice", "melts", "in", "spring", "春", "の", "海", "終日", "のたり", "한국어", "문장", "ăîșț"]
LIMIT = 0.01
MakeConfig = Callable[..., PretrainConfig]
TallyOf = Callable[[Sequence[InputFile], int], SourceTally]
Item = Document | BadLine


def _texts(random: Random) -> list[str]:
    return [f"{i} " + " ".join(random.choices(WORDS, k=random.randrange(1, 60))) for i in range(random.randrange(400))]


def _packed(random: Random, path: Path, texts: Sequence[str]) -> None:
    """Write the texts in one or several members with checksums."""
    step = random.choice([len(texts) + 1, 150, 40])
    lines = [json.dumps({"text": text}, ensure_ascii=random.random() < 0.5).encode() + b"\n" for text in texts]
    members = [b"".join(lines[i : i + step]) for i in range(0, len(lines) or 1, step)]
    pack = partial(gzip.compress, mtime=0) if path.suffix == ".gz" else partial(zstd.compress, options=CHECKED)
    path.write_bytes(b"".join(pack(member) for member in members))


def _damaged(random: Random, content: bytes) -> tuple[str, bytes]:
    """A kind of damage, and the content with it."""
    kind = random.choice(["cut", "bits flipped", "range repeated", "range dropped", "range zeroed"])
    start = random.randrange(len(content))
    end = min(len(content), start + random.choice([1, 50, 5000]))
    if kind == "cut":
        return kind, content[: start + 1]
    if kind == "bits flipped":
        changed = bytearray(content)
        for _ in range(random.randrange(1, 5)):
            changed[random.randrange(len(content))] ^= 1 << random.randrange(8)
        return kind, bytes(changed)
    middle = {"range repeated": content[start:end] * 2, "range dropped": b""}.get(kind, bytes(end - start))
    return kind, content[:start] + middle + content[end:]


def _lines_of_another_reader(path: Path) -> list[bytes]:
    """Whole lines that it can read."""
    parts: list[bytes] = []
    opened = gzip.open if path.suffix == ".gz" else zstd.open
    with suppress(OSError, EOFError, zlib.error, zstd.ZstdError), opened(path) as file:
        while part := file.read1(64):
            parts.append(part)
    return b"".join(parts).split(b"\n")[:-1]


def _text_of(line: bytes) -> str | None:
    """The text of a line by Python's own JSON, or None."""
    try:
        text = json.loads(line.decode())["text"]
    except (ValueError, KeyError, TypeError):
        return None
    good = isinstance(text, str) and text.strip() and "\0" not in text
    return text if good and text.isprintable() else None


def _check_lines(path: Path, items: Sequence[Item]) -> None:
    lines = _lines_of_another_reader(path)
    last = items[-1] if items else None
    stops = isinstance(last, BadLine) and last.reason is Reason.DAMAGED
    assert len(lines) <= len(items) - stops
    for line, item in zip(lines, items[:-1] if stops else items, strict=False):
        text = _text_of(line)
        assert text is None or (isinstance(item, Document) and item.text == text), line


def _passes(config: PretrainConfig, tally: SourceTally) -> bool:
    try:
        check_bad_fraction(config, tally, TokenPaths(config.output_prefix))
    except UserError:
        return False
    return True


def _check_closed(file: InputFile, tally: SourceTally) -> None:
    assert tally.bytes_in == file.bytes >= tally.bytes_lost + tally.bytes_unverified
    assert min(tally.bytes_lost, tally.bytes_unverified) >= 0
    assert (tally.skipped[Reason.DAMAGED] > 0) == (len(tally.damaged) > 0)


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst"])
def test_what_another_reader_can_read_arrives_and_all_else_is_counted(
    tmp_path: Path, make_config: MakeConfig, tally_of: TallyOf, ending: str
) -> None:
    """What it lost of the documents that were packed is never above the limit without the step saying so."""
    config = make_config(max_bad_fraction=LIMIT)
    done = Counter[str]()
    for seed in range(NUM_FILES // 2):
        random = Random(f"{seed}{ending}")
        texts, path = _texts(random), tmp_path / f"a{ending}"
        _packed(random, path, texts)
        whole = path.read_bytes()
        kind, content = _damaged(random, whole)
        path.write_bytes(content)
        (file,) = find_files([str(path)], "")
        items = list(read(Range(file), "text", "line"))
        _check_lines(path, items)
        tally = tally_of([file], 1 << 20)
        assert tally == tally_of([file], random.randrange(500, 20_000)), f"seed {seed}"
        _check_closed(file, tally)
        arrived = Counter(texts) & Counter(item.text for item in items if isinstance(item, Document))
        lost, passes = len(texts) - arrived.total(), _passes(config, tally)
        at_a_members_end = kind == "cut" and not tally.damaged
        if lost > LIMIT * len(texts) and not at_a_members_end:
            assert not passes, f"seed {seed}, {kind}: {lost} of {len(texts)} documents are lost"
        done.update({"lost": lost, "recovered": arrived.total(), "too many lost": lost > LIMIT * len(texts)})
    print(f"\n{ending}: {dict(done)}")
    assert done["lost"] and done["recovered"] and done["too many lost"]
