"""Step 2 in parts, encoded and merged by whoever comes: the bytes of one run, and what is no share of it is refused."""

import errno
import gzip
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from configs import fault_of
from made_tokens import discard_work, encode, finished, stopping_after

from zerokara.base.errors import RunError, UserError
from zerokara.base.manifest import file_key
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.writing import as_yaml
from zerokara.steps import tokenize
from zerokara.tokens.indexed import TokenPaths
from zerokara.tokens.shard_tasks import Part
from zerokara.tokens.work_folder import claimed, write_once

MakeConfig = Callable[..., PretrainConfig]
TASK_BYTES = 4000


@pytest.fixture
def config(make_config: MakeConfig, corpus: Path, tmp_path: Path) -> PretrainConfig:
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes() * 2))
    return make_config(input_jsonl=[str(corpus), str(tmp_path / "b.jsonl.gz")])


@pytest.fixture
def expected(config: PretrainConfig, tmp_path: Path) -> dict[str, bytes]:
    whole = config.model_copy(update={"output_prefix": str(tmp_path / "whole" / "tokens")})
    encode(whole, TASK_BYTES)
    return finished(whole)


@pytest.mark.parametrize(("of", "merge_of"), [(1, 1), (3, 4), (5, 2)])
def test_parts_write_as_one_run(config: PretrainConfig, expected: dict[str, bytes], of: int, merge_of: int) -> None:
    numbers = [*range(of), 0]  # one comes twice
    random.Random(of).shuffle(numbers)
    assert encode(config, TASK_BYTES, stage="encode", part=Part(998, 999)).text_bytes == 0, (
        "there are more parts than tasks"
    )
    for number in numbers:
        assert encode(config, TASK_BYTES, stage="encode", part=Part(number, of)).sources == []
    for number in range(merge_of - 1):  # and one not at all
        encode(config, TASK_BYTES, stage="merge", part=Part(number, merge_of))
    if merge_of > 1:
        with pytest.raises(UserError, match="other settings of the split"):
            encode(config.model_copy(update={"valid_fraction": 0.3}), TASK_BYTES, stage="merge", part=Part(1, merge_of))
    made = encode(config, TASK_BYTES, stage="merge")
    assert made.text_bytes == 0
    assert {*made.hashes} == {file_key(Path(entry)) for entry in config.input_jsonl}
    assert finished(config) == expected


def test_a_killed_part_goes_on_and_one_run_does_the_rest(config: PretrainConfig, expected: dict[str, bytes]) -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            encode(config, TASK_BYTES, stopping_after(3), stage="encode", part=Part(1, 2))
    with pytest.raises(UserError, match=r"at least \d+ of \d+ shards are not made yet .*start the parts again"):
        encode(config, TASK_BYTES, stage="merge")
    assert encode(config, TASK_BYTES, stage="encode", part=Part(1, 2)).resumed_shards == 6
    assert encode(config, 9 * TASK_BYTES).resumed_shards > 6, "the size of a task is that of the plan"
    assert finished(config) == expected


def test_a_part_of_other_work_is_refused(config: PretrainConfig, make_config: MakeConfig, corpus: Path) -> None:
    encode(config, TASK_BYTES, stage="encode", part=Part(0, 2))
    times = corpus.stat()
    os.utime(corpus, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    other = config.model_copy(update={"text_field": "body"})
    for of_work in ({"stage": "encode", "part": Part(1, 2)}, {"stage": "merge"}):
        text = str(fault_of(encode, other, TASK_BYTES, **of_work))
        assert "text_field was text, here it is body" in text and "cp -p" in text
        assert f"{corpus.name} of {times.st_size:,} bytes was read, and here is another time of change" in text
    os.utime(corpus, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert encode(config, TASK_BYTES, stage="encode", part=Part(0, 2)).text_bytes == 0, "nothing was lost"


def test_who_may_work_in_the_folder_at_once(config: PretrainConfig) -> None:
    paths = TokenPaths(config.output_prefix)
    with claimed(paths, "part-0-of-2"), claimed(paths, "part-1-of-2"):
        for share in ("", "part-1-of-2"):
            with pytest.raises(UserError, match=f"process {os.getpid()} is writing here"), claimed(paths, share):
                pass
    begun = paths.work_folder / "0000000-000000000000000.bin.1.partial"
    (paths.work_folder / "123").mkdir(parents=True)  # of an unknown run
    with claimed(paths):
        begun.write_bytes(b"the other run is at this")
        with pytest.raises(UserError, match="is writing here"):
            encode(config)
        discard_work(config)
        assert begun.exists(), "what another run is writing is not touched"
    with claimed(paths), ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        patched.setattr("zerokara.tokens.work_folder._BEGIN_SECONDS", 0.1)
        with pytest.raises(UserError, match="is writing here"):
            stack.enter_context(claimed(paths, "part-0-of-2"))
    assert not paths.work_folder.exists() and not paths.lock.exists()


def test_damaged_shards_do_not_count(config: PretrainConfig, expected: dict[str, bytes]) -> None:
    """The merge meets the damage."""
    encode(config, TASK_BYTES, stage="encode", part=Part(0, 2))
    folder = TokenPaths(config.output_prefix).work_folder
    made = sorted(folder.glob("*-*.json"))
    made[0].write_bytes(made[0].read_bytes()[:-1])
    with pytest.raises(UserError, match="not made yet"):
        encode(config, TASK_BYTES, stage="merge")
    assert encode(config, TASK_BYTES, stage="encode", part=Part(0, 2)).resumed_shards == len(made) - 1
    encode(config, TASK_BYTES, stage="encode", part=Part(1, 2))
    shard = made[1].with_suffix(".bin")
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(RunError, match="on the disk differs from what was written"):
        encode(config, TASK_BYTES, stage="merge")
    encode(config, TASK_BYTES, stage="encode", part=Part(0, 2))
    encode(config, TASK_BYTES, stage="merge")
    assert finished(config) == expected


def test_who_came_first_is_known_without_links_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    assert [write_once(tmp_path / "plan.json", {"a": number}) for number in (1, 2)] == [{"a": 1}, {"a": 1}]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_parts_of_another_text_wait_for_the_merge_that_is_told(
    config: PretrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(as_yaml(config), encoding="utf-8")
        assert tokenize.main(["--config", str(path), *arguments]) == 0
        return capsys.readouterr().out

    run()
    told = [run("--redo", "--part", f"{number}/2") for number in range(2)][1]
    assert "--merge --redo" in told
    assert "done already" in run() and "done already" in run("--merge")
    assert "had finished" in run("--merge", "--redo") and not TokenPaths(config.output_prefix).work_folder.exists()
