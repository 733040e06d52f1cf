"""Step 2 in parts, each in a process of its own as on a machine of a cluster: local processes are the scheduler."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_tokens
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_tokens import discard_work

from zerokara import hashing
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.find import InputFile, find_files
from zerokara.corpus.packed import zstd_module
from zerokara.corpus.read import Range
from zerokara.errors import RunError, UserError
from zerokara.manifest import RemoteFile
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens import work_folder
from zerokara.tokens.cluster import coordinator, part_process, reports
from zerokara.tokens.cluster.parts import Part, Tokenizer, deal, part_path, usual_number
from zerokara.tokens.cluster.scheduler import SilentSchedulerError
from zerokara.tokens.corpus_content import FileRecord
from zerokara.tokens.layout import TokenPaths
from zerokara.tokens.tasks import Stream, Task, TaskQueue, cut

MakeConfig = Callable[..., PretrainConfig]


class LocalProcesses:
    """A scheduler of one machine: each part is a process, `room` at once."""

    name, num_workers = "local", 1

    def __init__(self, room: int = 2) -> None:
        self.room, self.waiting = room, list[int]()
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.started: list[list[int]] = []
        self.answers = iter(lambda: True, False)
        self.when: Callable[[LocalProcesses, Path], None] = lambda scheduler, folder: None

    def start(self, folder: Path, numbers: Sequence[int]) -> None:
        self.started.append(list(numbers))
        (folder / work_folder.AT_WORK_NAME).touch()
        self.waiting += numbers
        self.at_work(folder)

    def at_work(self, folder: Path) -> set[int]:
        if not next(self.answers):
            raise SilentSchedulerError("the scheduler does not answer")
        self.when(self, folder)
        self.running = {number: process for number, process in self.running.items() if process.poll() is None}
        while self.waiting and len(self.running) < self.room:
            number = self.waiting.pop(0)
            with open(part_path(folder, number, "log"), "ab") as log:
                command = [sys.executable, "-m", "zerokara.tokens.cluster.part_process", str(folder), str(number)]
                self.running[number] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        return {*self.running, *self.waiting}

    def end(self, folder: Path) -> None:
        self.waiting.clear()
        for process in self.running.values():
            process.kill()
            process.wait()
        self.running.clear()
        (folder / work_folder.AT_WORK_NAME).unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("POLL_SECONDS", 0.05), ("ASK_SECONDS", 0.1), ("GRACE_SECONDS", 0.5), ("QUEUE_SECONDS", 0.3)):
        monkeypatch.setattr(coordinator, name, seconds)


@pytest.fixture
def scheduler() -> Iterator[LocalProcesses]:
    """It ends with the test."""
    made = LocalProcesses()
    yield made
    made.end(Path())


@pytest.fixture
def mixed(corpus: Path, tmp_path: Path) -> list[str]:
    """Every format: plain lines, two packings with many blocks, many small files, row groups."""
    text = corpus.read_bytes() * 2
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text))
    (tmp_path / "c.jsonl.zst").write_bytes(zstd_module().compress(text))
    (tmp_path / "d").mkdir()
    for number in range(40):
        (tmp_path / "d" / f"{number:02d}.txt").write_text(f"file {number}\nof text\n" * 20, encoding="utf-8")
    rows = [json.loads(line).get("text") for line in corpus.read_bytes().splitlines() if line.startswith(b'{"t')]
    pq.write_table(pa.table({"text": rows}), tmp_path / "e.parquet", row_group_size=50)
    names = ("b.jsonl.gz", "c.jsonl.zst", "d", "e.parquet")
    return [str(corpus), *(str(tmp_path / name) for name in names)]


def _encode(config: PretrainConfig, scheduler: LocalProcesses, parts: int = 3) -> Any:
    return made_tokens.encode(config, 8000, coordinator.runner(scheduler, parts))


def _files(config: PretrainConfig) -> dict[str, bytes]:
    folder = Path(config.output_prefix).parent
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@pytest.fixture
def config(make_config: MakeConfig, mixed: list[str]) -> PretrainConfig:
    """Of the text in all formats, on a cluster."""
    return make_config(input_jsonl=mixed, cluster="slurm")


@pytest.fixture
def expected(make_config: MakeConfig, mixed: list[str], tmp_path: Path) -> dict[str, bytes]:
    """What one machine writes."""
    config = make_config(input_jsonl=mixed, output_prefix=str(tmp_path / "one" / "tokens"))
    made_tokens.encode(config, 20_000)
    discard_work(config)
    return _files(config)


@pytest.mark.parametrize("parts", [1, 5])
def test_parts_write_what_one_machine_writes(
    config: PretrainConfig, scheduler: LocalProcesses, expected: dict[str, bytes], parts: int
) -> None:
    made = _encode(config, scheduler, parts)
    folder = TokenPaths(config.output_prefix).work_folder
    assert len(list(folder.glob("part-*.part"))) == parts and made.done.documents > 1000
    assert not list(folder.glob("*.error")) and scheduler.started == [list(range(parts))]
    discard_work(config)
    assert _files(config) == expected


def test_a_lost_part_costs_its_unfinished_shards(
    config: PretrainConfig, scheduler: LocalProcesses, expected: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    """The process dies with its machine, in the middle of its work."""
    killed: list[int] = []

    def kill(scheduler: LocalProcesses, folder: Path) -> None:
        if not killed and len(list(folder.glob("*-*.json"))) > 3 and scheduler.running:
            number, process = next(iter(scheduler.running.items()))
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed.append(number)

    scheduler.when = kill
    _encode(config, scheduler)
    assert scheduler.started == [[0, 1, 2], killed]
    assert "1 part ended before the work was done" in capfd.readouterr().out
    discard_work(config)
    assert _files(config) == expected


def test_another_number_of_parts_goes_on(
    config: PretrainConfig, scheduler: LocalProcesses, expected: dict[str, bytes], make_config: MakeConfig
) -> None:
    """The step is stopped; what is there is not done again, by another number of parts or by one machine."""

    def stop(scheduler: LocalProcesses, folder: Path) -> None:
        if len(list(folder.glob("*-*.json"))) > 5:
            raise KeyboardInterrupt

    scheduler.when = stop
    with pytest.raises(KeyboardInterrupt):
        _encode(config, scheduler)
    assert not scheduler.running
    folder = TokenPaths(config.output_prefix).work_folder
    assert not list(folder.glob("*.partial"))
    again = LocalProcesses()
    num_finished = len(list(folder.glob("*-*.json")))

    def stop_later(scheduler: LocalProcesses, folder: Path) -> None:
        if len(list(folder.glob("*-*.json"))) > num_finished + 10:
            raise KeyboardInterrupt

    again.when = stop_later
    with pytest.raises(KeyboardInterrupt):
        _encode(config, again, parts=7)
    made = made_tokens.encode(config.model_copy(update={"cluster": "none"}), 8000)
    assert made.resumed_shards > num_finished + 10
    discard_work(config)
    assert _files(config) == expected


def test_parts_that_are_still_at_work_are_waited_for(
    config: PretrainConfig, scheduler: LocalProcesses, expected: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    """The step was killed (here its generator is left open), and its parts go on."""
    folder = TokenPaths(config.output_prefix).work_folder
    left: list[Any] = []

    def leave(*arguments: Any) -> Any:
        left.append(coordinator.runner(scheduler, 3)(*arguments))
        yield next(left[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_tokens.encode(config, 8000, leave)
    running = dict(scheduler.running)
    assert running and folder.exists()
    _encode(config, scheduler, parts=5)
    assert "3 parts of an earlier start are still at work" in capfd.readouterr().out
    assert scheduler.started == [[0, 1, 2]]
    discard_work(config)
    assert _files(config) == expected


def test_a_part_that_never_works_ends_the_step(config: PretrainConfig, scheduler: LocalProcesses) -> None:
    """As where the machines do not see the work folder."""

    def kill(scheduler: LocalProcesses, folder: Path) -> None:
        for process in scheduler.running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    scheduler.when = kill
    with pytest.raises(RunError, match=r"part 0 has been started 4 times .* a place that all of them share"):
        _encode(config, scheduler)


def test_a_scheduler_that_does_not_answer_is_waited_for(
    config: PretrainConfig, scheduler: LocalProcesses, expected: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    scheduler.answers = iter([True] * 4 + [False] * 12 + [True] * 10_000)
    _encode(config, scheduler)
    assert capfd.readouterr().out.count("does not answer; waiting for it") == 1
    assert scheduler.started == [[0, 1, 2]]
    discard_work(config)
    assert _files(config) == expected


def test_waiting_in_the_queue_is_told(
    config: PretrainConfig, scheduler: LocalProcesses, capfd: pytest.CaptureFixture[str]
) -> None:
    def make_room(scheduler: LocalProcesses, folder: Path) -> None:
        asked.append(scheduler.room)
        scheduler.room = 2 if len(asked) > 15 else 0

    asked: list[int] = []
    scheduler.when = make_room
    _encode(config, scheduler)
    said = capfd.readouterr().out
    assert said.count("all parts wait for a machine") == said.count("the first part has started") == 1
    assert said.index("wait for a machine") < said.index("has started")


def test_an_error_of_a_part_is_the_steps(config: PretrainConfig, scheduler: LocalProcesses, mixed: list[str]) -> None:
    """It names the machine, and the other parts are ended."""

    def spoil(scheduler: LocalProcesses, folder: Path) -> None:
        path = folder / "part-00001.part"
        if path.exists() and not scheduler.running:
            path.write_bytes(path.read_bytes()[:-20])

    scheduler.room, scheduler.when = 3, spoil
    with pytest.raises(RunError, match=f"a tokenising process on {os.uname().nodename} met an unforeseen error"):
        _encode(config, scheduler)
    assert not scheduler.running


def test_a_machine_with_another_corpus_is_refused(
    config: PretrainConfig, scheduler: LocalProcesses, corpus: Path
) -> None:
    """Here it changes between the plan and the start of a part."""

    def change(scheduler: LocalProcesses, folder: Path) -> None:
        if not scheduler.running and folder.exists() and list(folder.glob("part-*.part")):
            with open(corpus, "ab") as file:
                file.write(b"{}\n")
            scheduler.when = lambda scheduler, folder: None

    scheduler.when = change
    with pytest.raises(UserError, match=rf"on {os.uname().nodename}: .*corpus.jsonl: has [\d,]+ bytes here, and "):
        _encode(config, scheduler)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_copy_of_the_corpus_is_compared_by_content(
    corpus: Path, tmp_path: Path, model_path: Path, is_same: bool
) -> None:
    """A machine has another time of change; where it has other bytes too, its shards are not used."""
    (file,) = find_files([str(corpus)], "")
    theirs = replace(file, modified_ns=file.modified_ns + 1)  # where the step was started
    folder, encoder = tmp_path / "work", Encoder(model_path)
    folder.mkdir()
    (folder / "plan.json").touch()
    Part(0, Tokenizer.of(encoder), "text", "line", 1, list(cut([theirs], 8000, "line"))).write(folder)
    assert part_process.main([str(folder), "0"]) == 0
    assert list(folder.glob("part-*.hashes")) and list(folder.glob("*-*.json"))
    sha256 = hashing.sha256_of(corpus) if is_same else "0" * 64
    if is_same:
        reports.check_hashes(folder, {FileRecord.of(theirs).key: sha256})
    else:
        with pytest.raises(RunError, match=f"is another file on {os.uname().nodename} than here"):
            reports.check_hashes(folder, {FileRecord.of(theirs).key: sha256})
    assert (folder / "plan.json").exists() == is_same


def test_a_machine_with_another_tokenizer_is_refused(corpus: Path, tmp_path: Path, model_path: Path) -> None:
    tokenizer = Tokenizer(str(model_path), "another", is_fast=False)
    Part(0, tokenizer, "text", "line", 1, list(cut(find_files([str(corpus)], ""), 8000, "line"))).write(tmp_path)
    assert part_process.main([str(tmp_path), "0"]) == 1
    with pytest.raises(UserError, match=f"on {os.uname().nodename}: .*is another tokenizer here"):
        reports.raise_error(tmp_path, ["part-00000.error"])


def test_what_is_dealt_is_everything_once(mixed: list[str], tmp_path: Path) -> None:
    files = find_files(mixed, "")
    for number in (1, 2, 3, 9):
        parts = deal(TaskQueue(cut(files, 8000, "line")).left, number)
        assert 0 < len(parts) <= number
        names = [one.name for part in parts for one in part if isinstance(one, Task)]
        assert sorted(names) == sorted(one.name for one in cut(files, 8000, "line") if isinstance(one, Task))
        streams = [one for part in parts for one in part if isinstance(one, Stream)]
        for index in {stream.index for stream in streams}:
            own = [stream for stream in streams if stream.index == index]
            assert sorted(stream.first for stream in own) == list(range(own[0].step)) and len(own) == own[0].step
        for part in parts:  # no part has two shares of one file
            indices = [one.index for one in part if isinstance(one, Stream)]
            assert len({*indices}) == len(indices)


def test_the_usual_number_of_parts() -> None:
    assert [usual_number(size) for size in (10**6, 10**11, 10**15)] == [4, 12, 500]


def test_a_part_survives_the_way_over_the_disk(mixed: list[str], tmp_path: Path) -> None:
    queue = TaskQueue(cut(find_files(mixed, ""), 8000, "line"))
    block = next(one for one in queue.left if isinstance(one, Stream)).block(8000)
    queue.take_over(block.name, at_end=False)
    (tasks,) = deal(queue.left, 1)
    part = Part(3, Tokenizer("a", "b", is_fast=True), "text", "line", None, tasks)
    part.write(tmp_path)
    read = Part.read(tmp_path, 3)
    assert sorted(map(repr, read.tasks)) == sorted(map(repr, tasks)) and block.name in repr(read.tasks)
    assert replace(read, tasks=()) == replace(part, tasks=()) and sorted(map(repr, read.files)) == sorted(
        map(repr, part.files)
    )


def test_a_file_on_the_hub_and_a_name_that_is_no_utf_8_keep_their_names(tmp_path: Path) -> None:
    there = RemoteFile("hf://datasets/owner/set@c0ffee/a/b.jsonl", 10, "git:1")
    remote = InputFile(Path(there.name), 0, "jsonl", "none", 10, 0, there)
    odd = InputFile(tmp_path / os.fsdecode(b"\xff.jsonl"), 1, "jsonl", "none", 5, 7)
    tasks = [Task("0000000-000000000000000", 0, (Range(remote),)), Task("0000001-000000000000000", 1, (Range(odd),))]
    Part(0, Tokenizer("a", "b", is_fast=False), "text", "line", 2, tasks).write(tmp_path)
    assert list(Part.read(tmp_path, 0).tasks) == tasks
