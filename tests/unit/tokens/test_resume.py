"""A run of step 2 that was ended at any moment: the next one resumes, and ends with the same files."""

import errno
import gzip
import hashlib
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_tokens
import pytest
from configs import fault_of
from made_tokens import finished, stopping_after, written

from zerokara.base.errors import RunError
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.tokens import merge
from zerokara.tokens.encode import EncodedCorpus, run_in_workers
from zerokara.tokens.indexed import TokenPaths
from zerokara.tokens.work_folder import ShardPlan

MakeConfig = Callable[..., PretrainConfig]
TASK_BYTES = 4000


def _encode(config: PretrainConfig, task_bytes: int = TASK_BYTES, **how: Any) -> EncodedCorpus:
    return made_tokens.encode(config, task_bytes, **how)


def _stop(config: PretrainConfig, shards: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        _encode(config, run_tasks=stopping_after(shards))


@pytest.fixture
def expected(make_config: MakeConfig, tmp_path: Path) -> dict[str, bytes]:
    config = make_config(output_prefix=str(tmp_path / "unbroken" / "tokens"))
    _encode(config)
    return finished(config)


@pytest.fixture
def mixed(corpus: Path, tmp_path: Path) -> list[str]:
    """Three sources: plain, packed with many blocks, and small files."""
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes() * 3))
    (tmp_path / "c").mkdir()
    for number in range(30):
        (tmp_path / "c" / f"{number:02d}.txt").write_text(f"file {number}\nof text\n" * 20, encoding="utf-8")
    return [str(corpus), str(tmp_path / "b.jsonl.gz"), str(tmp_path / "c")]


@pytest.mark.parametrize(("workers", "shards"), [(1, 5), (3, 1)])
def test_it_resumes(make_config: MakeConfig, mixed: list[str], tmp_path: Path, workers: int, shards: int) -> None:
    whole = make_config(input_jsonl=mixed, output_prefix=str(tmp_path / "whole" / "tokens"), num_workers=2)
    _encode(whole, task_bytes=100_000)
    config = make_config(input_jsonl=mixed, num_workers=workers)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            _encode(config, run_tasks=stopping_after(shards, run_in_workers))
    assert written(config) == {}
    # Another number of workers and another size of tasks would be chosen now; what is there decides.
    other = config.model_copy(update={"num_workers": 2})
    made = _encode(other, task_bytes=50_000)
    assert made.resumed_shards >= 3 * shards
    assert finished(config) == finished(whole)


@pytest.mark.parametrize("change", ["corpus", "tokenizer", "field", "time", "format"])
def test_other_input_starts_over_and_says_so(
    make_config: MakeConfig, corpus: Path, tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config()
    _stop(config, 2)
    if change == "corpus":
        corpus.write_bytes(corpus.read_bytes() + b'{"text": "one more"}\n')
    if change == "tokenizer":
        other = tmp_path / "other.model"
        other.write_bytes(Path(config.input_tokenizer_file).read_bytes() + b"\x1a\x00")
        config = config.model_copy(update={"input_tokenizer_file": str(other)})
    if change == "field":
        config = config.model_copy(update={"txt_document": "file"})
    times, plan = corpus.stat(), TokenPaths(config.output_prefix).work_folder / "plan.json"
    if change == "time":
        os.utime(corpus, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    if change == "format":
        earlier = json.loads(plan.read_bytes())
        plan.write_text(json.dumps(earlier | {"format": earlier["format"] - 1}), encoding="utf-8")
    capsys.readouterr()
    assert _encode(config).resumed_shards == 0
    was = f"{corpus.name} of {times.st_size:,} bytes was read, and here is another time of change"
    message = capsys.readouterr().out
    assert "starting over" in message and (was in message or change != "time")


def test_the_file_that_differs_is_told() -> None:
    def plan(*files: list[Any]) -> ShardPlan:
        return ShardPlan([*files], "", "text", "file", 1)

    first, second, changed = ["a.jsonl", 5, 1, 0], ["b.jsonl", 6, 1, 0], ["b.jsonl", 7, 2, 0]
    assert plan(first, second).differences(plan(first, second)) == []
    told = "b.jsonl of 6 bytes was read, and here is b.jsonl of 7 bytes"
    assert plan(first, changed).differences(plan(first, second)) == [told]
    assert plan(first).differences(plan(first, second)) == ["b.jsonl of 6 bytes was read, and here is no file"]


@pytest.mark.parametrize("damage", ["cut off", "a byte changed", "gone", "no mark", "bad lines lost"])
def test_a_damaged_shard_is_made_again(make_config: MakeConfig, expected: dict[str, bytes], damage: str) -> None:
    config = make_config()
    _stop(config, 30 if damage == "bad lines lost" else 3)
    folder = TokenPaths(config.output_prefix).work_folder
    assert not list(folder.glob("*.partial"))
    shard = sorted(folder.glob("*.bin"))[1]
    if damage == "bad lines lost":
        shard = next(path for path in folder.glob("*.bad") if path.stat().st_size)
        shard.write_bytes(bytes(shard.stat().st_size))
    content = bytearray(shard.read_bytes())
    content[100] ^= damage == "a byte changed"  # which the merge finds
    shard.write_bytes(content[:-2] if damage == "cut off" else content)
    if damage == "gone":
        shard.unlink()
    if damage == "no mark":
        shard.with_suffix(".json").write_text("{", encoding="utf-8")
    if damage in ("a byte changed", "bad lines lost"):
        with pytest.raises(RunError, match=f"{shard.stem} on the disk differs .* The same command makes it again"):
            _encode(config)
    assert _encode(config).resumed_shards == 2 or damage in ("a byte changed", "bad lines lost")
    assert finished(config) == expected


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_merge_that_is_ended_anywhere_resumes(
    make_config: MakeConfig, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The merge is ended again and again, each time a little further on, and never needs a shard that it deleted."""
    chance, config = random.Random(seed), make_config()
    places = [(merge, "write_at"), (merge, "index_part"), (merge, "write_once"), (merge, "sync_folder")]
    places += [(merge.os, name) for name in ("replace", "fsync")]
    for _ in range(12):
        with monkeypatch.context() as patched:
            (module, place), after = chance.choice(places), chance.randint(0, 6)
            original, calls = getattr(module, place), [0]

            def failing(*arguments: Any, original: Any = original, calls: list[int] = calls, after: int = after) -> Any:
                calls[0] += 1
                if calls[0] > after:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return original(*arguments)

            patched.setattr(module, place, failing)
            try:
                made = _encode(config)
            except RunError as error:
                assert "the disk is full" in str(error) and "finished shards" in str(error)
            else:
                assert made.sources[0].train.documents == 290
    assert _encode(config).text_bytes == 0, "everything was encoded in the first run"
    assert finished(config) == expected


def test_a_shard_goes_before_many_more_are_copied(
    make_config: MakeConfig, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the corpus would lie on the disk twice."""
    config, left, copy = make_config(), list[int](), merge.index_part
    folder = TokenPaths(config.output_prefix).work_folder

    def counting(*arguments: Any) -> Any:
        left.append(len(list(folder.glob("*-*.bin"))))
        return copy(*arguments)

    monkeypatch.setattr(merge, "index_part", counting)
    _encode(config, TASK_BYTES // 4)
    assert left[0] > 40 and left[-1] < 0.6 * left[0]
    assert finished(config) == expected


def test_another_split_later_is_refused(
    make_config: MakeConfig, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()

    def failing(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(merge, "index_part", failing)
        with pytest.raises(RunError, match="the disk is full"):
            _encode(config)
    fault = fault_of(_encode, make_config(valid_fraction=0.2))
    assert fault.rule.endswith(": valid_fraction was 0.01, here it is 0.2") and "use those settings" in fault.remedy
    _encode(config)
    assert finished(config) == expected


def test_a_disk_that_fails_to_read_and_a_corpus_that_was_moved_with_its_times_cost_no_finished_shard(
    make_config: MakeConfig, expected: dict[str, bytes], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, real = make_config(), io.open
    _stop(config, 4)

    def stale(path: Any, *arguments: Any, **named: Any) -> Any:
        if str(path).endswith("plan.json"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(io, "open", stale)
        with pytest.raises(RunError, match=r"plan\.json: Stale file handle; 4 finished shards"):
            _encode(config)
    moved = tmp_path / "elsewhere" / "corpus.jsonl"
    moved.parent.mkdir()
    corpus.rename(moved)
    made = _encode(config.model_copy(update={"input_jsonl": (str(moved),)}))
    assert 0 < made.text_bytes < sum(each.train.text_bytes + each.valid.text_bytes for each in made.sources)
    assert made.resumed_shards == 4 and list(made.hashes.values()) == [hashlib.sha256(moved.read_bytes()).hexdigest()]
    files = finished(config)
    assert files.pop("tokens_quarantine.jsonl") != expected.pop("tokens_quarantine.jsonl"), "it names the file"
    assert files == expected
