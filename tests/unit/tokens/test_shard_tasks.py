"""How the corpus is cut into tasks, and which of them a part does; test_quarantine has that no cutting loses a line."""

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.find import InputFile, find_files
from zerokara.corpus.read import Range
from zerokara.tokens import shard_tasks
from zerokara.tokens.shard_tasks import WHOLE, Part, expected, input_streams, num_workers
from zerokara.tokens.shards import ShardTask


def _all(files: Sequence[InputFile], size: int, part: Part = WHOLE) -> list[ShardTask]:
    return [task for stream in input_streams(files, size, "line", part, {})[0] for task in stream]


def _packed(folder: Path, *names: str) -> list[InputFile]:
    for name in names:
        lines = (b'{"text": "%d %x"}\n' % (i, Random(f"{name} {i}").getrandbits(200)) for i in range(100))
        (folder / name).write_bytes(gzip.compress(b"".join(lines), 1))
    return find_files([str(folder)], "")


def test_tasks_keep_to_one_source_and_gather_small_files(tmp_path: Path) -> None:
    for name in ("a1", "a2", "a3", "b1"):
        (tmp_path / f"{name}.txt").write_text("x" * 99 + "\n", encoding="utf-8")
    files = find_files([str(tmp_path / "a*.txt"), str(tmp_path / "b1.txt")], "")
    made = _all(files, 250)
    assert [[part.file.path.stem for part in task.ranges] for task in made] == [["a1", "a2"], ["a3"], ["b1"]]
    assert [task.source for task in made] == [0, 0, 1]
    assert [task.name for task in made] == sorted(task.name for task in made) and len({*made}) == 3
    assert [len(task.ranges) for task in _all(files, 60)] == [1] * 8
    assert expected(files, 250, "line", {}) == (made, [task.name for task in made])


def test_packed_files_are_read_whole_where_small_or_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = _packed(tmp_path, "a.jsonl.gz", "b.jsonl.gz")
    whole = _all(files, 8 * max(file.bytes for file in files))
    assert [part.end for task in whole for part in task.ranges if isinstance(part, Range)] == [None, None]
    assert len(_all(files, 1000)) > 2
    (tmp_path / "one.txt.gz").write_bytes(files[0].path.read_bytes())
    one = input_streams(find_files([str(tmp_path / "one.txt.gz")], ""), 1000, "file", WHOLE, {})[0]
    assert [type(part) for stream in one for task in stream for part in task.ranges] == [Range], "one document"
    monkeypatch.setattr(shard_tasks, "MANY_FILES", 1)
    assert len(_all(files, 1000)) == 2


@pytest.mark.parametrize("of", [1, 2, 3, 5])
def test_parts_share_all_tasks(tmp_path: Path, of: int) -> None:
    (tmp_path / "b.jsonl").write_text("{}\n" * 3000, encoding="utf-8")
    files = _packed(tmp_path, "a.jsonl.gz", "c.jsonl.gz")
    shares = [{task.name for task in _all(files, 1000, Part(number, of))} for number in range(of)]
    assert all(shares) and sum(map(len, shares)) == len(set.union(*shares))
    assert set.union(*shares) == {task.name for task in _all(files, 1000)}
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 3


def test_no_more_workers_than_work(make_config: Callable[..., PretrainConfig], tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl.gz"):
        (tmp_path / name).write_bytes(bytes(300_000))
    config = make_config(num_workers=60)
    (plain,), (packed,) = (find_files([str(tmp_path / name)], "") for name in ("a.jsonl", "b.jsonl.gz"))
    assert [num_workers(config, [file]) for file in (plain, packed)] == [1, 3]
    assert num_workers(config, [plain] * 400) == num_workers(config) == 60
