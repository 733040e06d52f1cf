"""How the corpus is cut into tasks, and who does which."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.find import find_files
from zerokara.tokens.tasks import Task, TaskQueue, cut


def _all(queue: TaskQueue, worker: int = 0) -> list[Task]:
    tasks = []
    while (task := queue.next(worker)) is not None:
        tasks.append(task)
        queue.finished(task, at_end=len(tasks) > 20)
    return tasks


def test_tasks_keep_to_one_source_and_gather_small_files(
    make_config: Callable[..., PretrainConfig], tmp_path: Path
) -> None:
    for name in ("a1", "a2", "a3", "b1"):
        (tmp_path / f"{name}.txt").write_text("x" * 99 + "\n", encoding="utf-8")
    files = find_files([str(tmp_path / "a*.txt"), str(tmp_path / "b1.txt")], "")
    tasks = _all(TaskQueue(cut(files, 250, "line")))
    assert [[range_.file.path.stem for range_ in task.ranges] for task in tasks] == [["a1", "a2"], ["a3"], ["b1"]]
    assert [task.source for task in tasks] == [0, 0, 1]
    assert [task.name for task in tasks] == sorted(task.name for task in tasks) and len({*tasks}) == 3
    assert [len(task.ranges) for task in _all(TaskQueue(cut(files, 60, "line")))] == [1] * 8


def _packed(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(gzip.compress(bytes(range(32, 127)) * 50, 0))


def test_workers_stay_on_their_stream_and_join_others_last(tmp_path: Path) -> None:
    _packed(tmp_path, "a.jsonl.gz", "c.jsonl.gz")
    (tmp_path / "b.jsonl").write_text("{}\n" * 100, encoding="utf-8")
    queue = TaskQueue(cut(find_files([str(tmp_path)], ""), 1000))
    first, second = queue.next(1), queue.next(2)
    assert first and second and first.ranges[0].file.name.endswith("a.jsonl.gz")
    assert second.ranges[0].file.name.endswith("c.jsonl.gz")
    third = queue.next(3)
    assert third and third.ranges[0].file.name.endswith("b.jsonl"), "no stream is free: the plain file"
    queue.finished(first, at_end=False)
    again = queue.next(1)
    assert again and (again.ranges[0].start, again.ranges[0].end) == (1000, 2000)
    joined = queue.next(3)
    assert joined and joined.ranges[0].start in (1000, 2000), "all else is handed out: it joins a stream"
    queue.finished(again, at_end=True)
    queue.finished(second, at_end=True)
    assert queue.next(1) is None and queue.next(2) is None and queue.next(3) is None
    assert queue.tasks == sorted([first, second, third, again, joined], key=lambda task: task.name)


def test_a_small_packed_file_is_read_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 100))
    (task,) = _all(TaskQueue(cut(find_files([str(tmp_path)], ""), 1000)))
    assert task.ranges[0].end is None


def test_what_is_done_is_not_handed_out_again(tmp_path: Path) -> None:
    _packed(tmp_path, "a.jsonl.gz")
    (tmp_path / "b.jsonl").write_text("{}\n" * 1000, encoding="utf-8")
    files = find_files([str(tmp_path)], "")
    queue = TaskQueue(cut(files, 1000))
    stream = [queue.next(0) for _ in range(3)]
    names = [task.name for task in stream if task]
    again = TaskQueue(cut(files, 1000), done=names[1:], ended_streams=())
    tasks = [again.next(0) for _ in range(3)]
    assert [task.ranges[0].start for task in tasks if task] == [0, 3000, 4000]
    ended = TaskQueue(cut(files, 1000), done=names, ended_streams=names[2:])
    assert [range_.start for task in _all(ended) for range_ in task.ranges] == [0, 1000, 2000]
    assert [task.name for task in ended.tasks[:3]] == names


def test_a_block_that_is_missing_before_the_end_is_handed_out(tmp_path: Path) -> None:
    """A run that was killed may have met the end of a packed file with a block before it still unfinished."""
    _packed(tmp_path, "a.jsonl.gz")
    files = find_files([str(tmp_path)], "")
    first = TaskQueue(cut(files, 1000))
    names = [task.name for task in (first.next(0), first.next(1), first.next(0), first.next(1)) if task]
    again = TaskQueue(cut(files, 1000), done=[names[0], *names[2:]], ended_streams=names[2:])
    assert not again.is_empty
    assert [task.name for task in iter(lambda: again.next(0), None)] == [names[1]]
    assert again.is_empty and [task.name for task in again.tasks] == names
