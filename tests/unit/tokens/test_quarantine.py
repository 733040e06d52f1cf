"""What became of every document and byte: the counts close, for any cutting, and decide on `max_bad_fraction`.

`ZEROKARA_FUZZ_FILES=1000 pytest tests/unit/tokens/test_quarantine.py -s` damages a thousand files instead of a few.
"""

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from configs import fault_of, refused
from corpus_files import compressed
from made_tokens import discard_work, encode, written
from pydantic import TypeAdapter

from zerokara.base import manifest
from zerokara.base.errors import UserError
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus import documents
from zerokara.corpus.compressed import CUT, zstd_module
from zerokara.corpus.documents import Document, Reason
from zerokara.corpus.find import InputFile, find_files
from zerokara.corpus.read import Range, read
from zerokara.steps.command import Options
from zerokara.steps.tokenize import tokenize
from zerokara.tokens.encode import run_in_workers
from zerokara.tokens.indexed import TokenPaths
from zerokara.tokens.quarantine import SourceTally, check_bad_fraction

zstd: ModuleType = zstd_module()
MakeConfig = Callable[..., PretrainConfig]
TallyOf = Callable[[Sequence[InputFile], int], SourceTally]
SIZES = (50, 999, 1 << 20)
DAMAGED = "truncated or damaged file"
CHECKED = {zstd.CompressionParameter.checksum_flag: 1}
NUM_FILES = int(os.environ.get("ZEROKARA_FUZZ_FILES", "60"))
LIMIT = 0.01


def _lines(count: int) -> bytes:
    random = Random(count)
    return b"".join(b'{"text": "%d %x"}\n' % (i, random.getrandbits(400)) for i in range(count))


def _damaged_parquet(path: Path, num_rows: int = 1000, group_rows: int = 100, spoilt: int = 3) -> int:
    """A .parquet one of whose row groups cannot be read; gives the bytes of that one's columns."""
    texts = [f"{i} {Random(i).getrandbits(300):x}" for i in range(num_rows)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=group_rows, use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(spoilt).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 40] = b"\xff" * 40
    path.write_bytes(content)
    return int(column.total_compressed_size)


def _same_for_all_sizes(path: Path, tally_of: TallyOf) -> SourceTally:
    files = find_files([str(path)], "")
    tallies = [tally_of(files, size) for size in SIZES]
    for tally in tallies:
        assert tally == tallies[0] and tally.bytes_in == sum(file.bytes for file in files)
    return tallies[0]


def test_bad_lines_count_as_documents(
    tmp_path: Path, tally_of: TallyOf, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 1000)
    bad = {"broken JSON": b"{broken\n", "empty line": b"\r\n", f"longer than {64} MiB": b"x" * 3000 + b"\n"}
    content = _lines(20) + b"".join(bad.values()) + _lines(30) + bad["broken JSON"] + b'{"text": "cut'
    (tmp_path / "a.jsonl").write_bytes(content)
    tally = _same_for_all_sizes(tmp_path / "a.jsonl", tally_of)
    assert tally.skipped == dict.fromkeys(bad, 1) | {"broken JSON": 2, "truncated last line": 1}
    assert tally.documents == 50 and tally.documents_in == 55
    assert (tally.bytes_lost, tally.bytes_in) == (3001, len(content)) and "64 MiB: 3.0 kB of" in tally.damages
    fault, _ = refused(check_bad_fraction, make_config(max_bad_fraction=0.07), tally, TokenPaths("x"))
    assert fault.rule.startswith("4 of 54 documents are bad"), "an empty line is no loss"


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_cut_off_file_counts_whole(tmp_path: Path, tally_of: TallyOf, make_config: MakeConfig, ending: str) -> None:
    """Of half a file most documents may be lost, though all bytes that are there can be read."""
    packed = (gzip.compress if ending == ".gz" else zstd.compress)(_lines(9000))
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(packed[: len(packed) // 2])
    (tmp_path / "good").mkdir()
    tally = tally_of(find_files([str(path)], ""), 1 << 20)
    (damage,) = tally.damaged
    assert damage.startswith(f"{path} ({CUT}: ")
    assert tally.skipped.total() == 1 and tally.documents > 4000
    assert tally.bytes_lost == tally.bytes_in == len(packed) // 2
    fault = fault_of(check_bad_fraction, make_config(max_bad_fraction=0.5), tally, TokenPaths("x"))
    size = f"{path.stat().st_size:,}"
    assert fault.key == "max_bad_fraction" and fault.value == 0.5
    assert f"{size} of {size} bytes on the disk are lost (100 %)" in fault.rule and str(path) in fault.rule
    assert "download" in fault.remedy and "starts over" in fault.remedy and "set it to 1" in fault.remedy
    check_bad_fraction(make_config(max_bad_fraction=1), tally, TokenPaths("x"))
    both = SourceTally(10, Counter({"broken JSON": 2, "empty line": 3}), bytes_in=100, bytes_lost=90)
    first, second = refused(check_bad_fraction, make_config(max_bad_fraction=0.1), both, TokenPaths("x"))
    assert "or set it to 0.9" in first.remedy and "or set it to 0.9" in second.remedy, "what is enough for both"
    assert first.rule == "2 of 7 documents are bad (28.6 %): broken JSON 2"


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_bad_document_that_is_a_file_has_lost_its_bytes(ending: str, tmp_path: Path, make_config: MakeConfig) -> None:
    """Among a thousand lines of another file it is one document, and four fifths of the text."""
    (tmp_path / "a.jsonl").write_bytes(_lines(1000))
    book = bytes(Random(1).choices(range(0xE0, 0x100), k=400_000))
    name = compressed(tmp_path / f"book.txt{ending}", b"in ASCII\n" * 6000 + book).name
    settings = {"input_jsonl": [str(tmp_path)], "output_prefix": str(tmp_path / "out" / "tokens")}
    fault = fault_of(encode, make_config(**settings, txt_document="file"))
    assert fault.key == "max_bad_fraction" and f"{name} (invalid UTF-8: " in fault.rule and "UTF-8" in fault.remedy


def test_every_row_of_a_damaged_row_group_counts(tmp_path: Path, tally_of: TallyOf, make_config: MakeConfig) -> None:
    group_bytes = _damaged_parquet(tmp_path / "a.parquet")
    tally = _same_for_all_sizes(tmp_path / "a.parquet", tally_of)
    assert (tally.documents_in, tally.documents, tally.skipped) == (1000, 900, {DAMAGED: 100})
    assert tally.bytes_lost == pytest.approx(group_bytes, rel=0.1)
    assert len(tally.damaged) == 1
    with pytest.raises(UserError, match=r"max_bad_fraction = 0\.09: 100 of 1,000"):
        check_bad_fraction(make_config(max_bad_fraction=0.09), tally, TokenPaths("x"))
    check_bad_fraction(make_config(max_bad_fraction=0.11), tally, TokenPaths("x"))


def test_rows_that_were_given_before_the_damage_stay_documents(tmp_path: Path, tally_of: TallyOf) -> None:
    texts = [f"{i} " + "x" * 20_000 for i in range(1000)]  # several batches
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, use_dictionary=False, compression="none", data_page_size=1 << 17)
    content = bytearray(path.read_bytes())
    place = len(content) * 9 // 10
    content[place : place + 300_000] = b"\xff" * 300_000  # more than a page, so that its header is hit
    path.write_bytes(content)
    tally = _same_for_all_sizes(path, tally_of)
    assert tally.documents_in == 1000 and 300 < tally.documents < 920
    assert tally.bytes_lost == path.stat().st_size - path.stat().st_size * tally.documents // 1000


def test_only_packed_files_without_a_byte_are_damaged(tmp_path: Path, tally_of: TallyOf) -> None:
    names = ["a.jsonl", "b.jsonl", "c.txt", "d.jsonl.gz", "e.txt.zst", "f.parquet"]
    for name in names:
        (tmp_path / name).write_bytes(_lines(20) if name == "a.jsonl" else b"")
    tally = _same_for_all_sizes(tmp_path, tally_of)
    assert [Path(damage.partition(" ")[0]).name for damage in tally.damaged] == names[3:]
    assert tally.skipped == {DAMAGED: 3} and tally.documents == 20


def _mixed(tmp_path: Path, corpus: Path) -> list[str]:
    packed = gzip.compress(corpus.read_bytes() * 3)
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[: len(packed) * 2 // 3])
    (tmp_path / "spoilt.jsonl.zst").write_bytes(zstd.compress(corpus.read_bytes()) + b"garbage")
    _damaged_parquet(tmp_path / "rows.parquet")
    (tmp_path / "empty.jsonl.gz").touch()
    return [str(corpus), str(tmp_path / "*.gz"), str(tmp_path / "spoilt.jsonl.zst"), str(tmp_path / "rows.parquet")]


def test_workers_tasks_and_resuming_change_no_count(make_config: MakeConfig, corpus: Path, tmp_path: Path) -> None:
    made, entries = [], _mixed(tmp_path, corpus)
    for number, (workers, task_bytes) in enumerate([(1, None), (3, 30_000)]):
        prefix = str(tmp_path / f"out{number}" / "tokens")
        config = make_config(input_jsonl=entries, output_prefix=prefix, num_workers=workers, max_bad_fraction=1)
        encoded = encode(config, task_bytes, run_in_workers)
        made.append((encoded.sources, written(config)))
        if task_bytes:
            results = sorted(TokenPaths(prefix).work_folder.glob("*-*.json"))
            for path in results[::2]:
                path.unlink()
            again = encode(config)
            assert again.resumed_shards == len(results) - len(results[::2])
            made.append((again.sources, written(config)))
        discard_work(config)
    for one in made[1:]:
        assert one == made[0]
    tally = sum(made[0][0], SourceTally())
    assert tally.bytes_in == sum(file.bytes for file in find_files(config.input_jsonl, ""))
    splits = [split for source in made[0][0] for split in (source.train, source.valid)]
    assert tally.documents_in == sum(split.documents for split in splits) + tally.skipped.total()
    assert len(tally.damaged) == 4


def test_the_step_names_the_damaged_files_and_keeps_the_counts(
    make_config: MakeConfig, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"input_jsonl": _mixed(tmp_path, corpus)}
    config, options = make_config(**settings, max_bad_fraction=1), Options(tmp_path / "config.yaml")
    tokenize(config, options)
    said = capsys.readouterr().out
    assert "4 files: " in said
    for name in ("cut.jsonl.gz", "empty.jsonl.gz", "spoilt.jsonl.zst", "rows.parquet"):
        assert f"{name} (" in said
    facts = manifest.read(TokenPaths(config.output_prefix).manifest).facts
    assert facts["damaged_files"] == len(facts["damaged"]) == 4
    tally = TypeAdapter(SourceTally).validate_python(facts)
    assert tally.bytes_lost >= (tmp_path / "cut.jsonl.gz").stat().st_size
    # What was written stays, and a stricter limit says what is wrong with it.
    fault = fault_of(tokenize, make_config(**settings, max_bad_fraction=0.1), options)
    assert (fault.key, fault.value) == ("max_bad_fraction", 0.1) and "cut.jsonl.gz" in fault.rule


def _packed(random: Random, texts: Sequence[str], ending: str) -> bytes:
    """The texts in one or several members with checksums."""
    step = random.choice([len(texts) + 1, 150, 40])
    lines = [json.dumps({"text": text}, ensure_ascii=random.random() < 0.5).encode() + b"\n" for text in texts]
    members = [b"".join(lines[i : i + step]) for i in range(0, len(lines) or 1, step)]
    pack = partial(gzip.compress, mtime=0) if ending == ".jsonl.gz" else partial(zstd.compress, options=CHECKED)
    return b"".join(pack(member) for member in members)


def _damaged(random: Random, content: bytes) -> tuple[str, bytes]:
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


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst"])
def test_what_is_lost_is_never_silent(tmp_path: Path, make_config: MakeConfig, tally_of: TallyOf, ending: str) -> None:
    """By any damage, made at random; test_compressed has what can be read of a damaged file."""
    config, done = make_config(max_bad_fraction=LIMIT), Counter[str]()
    for seed in range(NUM_FILES // 2):
        random, path = Random(f"{seed}{ending}"), tmp_path / f"a{ending}"
        texts = [f"{i} " + "the sea 春 の 海 " * random.randrange(1, 20) for i in range(random.randrange(400))]
        kind, content = _damaged(random, _packed(random, texts, ending))
        path.write_bytes(content)
        files = find_files([str(path)], "")
        tally = tally_of(files, 1 << 20)
        assert tally == tally_of(files, random.randrange(500, 20_000)), f"seed {seed}"
        assert tally.bytes_in == len(content) >= tally.bytes_lost >= 0
        assert (tally.skipped[Reason.DAMAGED] > 0) == (len(tally.damaged) > 0)
        arrived = Counter(item.text for item in read(Range(files[0])) if isinstance(item, Document)) & Counter(texts)
        lost, at_a_members_end = len(texts) - arrived.total(), kind == "cut" and not tally.damaged
        if lost > LIMIT * len(texts) and not at_a_members_end:
            with pytest.raises(UserError):
                check_bad_fraction(config, tally, TokenPaths("x"))
        done.update({"lost": lost, "recovered": arrived.total(), "too many lost": lost > LIMIT * len(texts)})
    print(f"\n{ending}: {dict(done)}")
    assert done["lost"] and done["recovered"] and done["too many lost"]


def test_a_share_that_is_set_to_what_was_told_is_enough(make_config: MakeConfig) -> None:
    """0.29 · 100 is less than 29 in floating point."""
    for bad in range(1, 100):
        tally = SourceTally(documents_in=100, skipped=Counter({"broken JSON": bad}))
        fault = refused(check_bad_fraction, make_config(max_bad_fraction=0), tally, TokenPaths("x"))[0]
        enough = float(fault.remedy.split()[-1])
        assert enough == bad / 100
        tally.train.documents = 100 - bad
        check_bad_fraction(make_config(max_bad_fraction=enough), tally, TokenPaths("x"))
