"""A checkpoint that several processes write, each its rows: read as one, whole or not there at all."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fault_of
from made_checkpoints import state_of
from torch import Tensor
from torch.distributed import HashStore

from zerokara import checkpoint
from zerokara.base.errors import UserError
from zerokara.checkpoint import store, tensor_file
from zerokara.checkpoint.state import Share
from zerokara.checkpoint.store import Writers

WEIGHTS = {
    "matrix": torch.randn(7, 5),
    "norm": torch.randn(4),
    "experts": torch.randn(2, 3, 2),
    "one": torch.randn(1, 9),
}
MOMENTS = {"matrix.exp_avg": torch.randn(7, 5), "scale": torch.tensor(2.5)}


def rows_of(mine: Share, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    own = {name: (whole, mine.rows(whole.shape)) for name, whole in tensors.items() if mine.rows(whole.shape)}
    return {name: whole[rows.start : rows.stop] if whole.dim() else whole for name, (whole, rows) in own.items()}


@contextmanager
def others(run_dir: Path, count: int) -> Iterator[Writers]:
    """All processes but the first, as threads that serve one checkpoint after another; yields the first's writers."""
    messages, leave = HashStore(), threading.Event()
    messages.set_timeout(timedelta(seconds=20))

    def serve(index: int) -> None:
        mine = Share(index, count)
        served = Writers(mine, messages)
        while not leave.is_set():
            served.serve(run_dir, {"weights": rows_of(mine, WEIGHTS), "optimizer": rows_of(mine, MOMENTS)}, leave)

    with ThreadPoolExecutor(count) as threads:
        serving = [threads.submit(serve, index) for index in range(1, count)]
        try:
            yield Writers(Share(0, count), messages)
        finally:
            leave.set()
        for each in serving:
            each.result()


def saved_by(run_dir: Path, first: Writers, step: int = 10) -> Path:
    try:
        mine = rows_of(first.share, WEIGHTS), rows_of(first.share, MOMENTS)
        return store.save(run_dir, state_of(step), *mine, first)
    finally:
        first.finish()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_are_read_as_one(tmp_path: Path, count: int) -> None:
    for shape in [(7, 5), (4,), (1, 9), ()]:
        rows = [Share(index, count).rows(shape) for index in range(count)]
        assert [row for each in rows for row in each] == list(range(shape[0] if shape else 1))
        assert max(map(len, rows)) - min(map(len, rows)) <= 1
    with others(tmp_path, count) as first:
        folder = saved_by(tmp_path, first)
    weights, moments = checkpoint.read_weights(folder), checkpoint.read_moments(folder)
    assert weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(weights[name], whole) for name, whole in WEIGHTS.items())
    assert all(torch.equal(moments[name], whole) for name, whole in MOMENTS.items())
    assert folder.name == "global_step10" and checkpoint.read_state(folder) == state_of(10)
    record = checkpoint.check(folder)
    assert len(record.outputs["weights"]) == len(record.outputs["optimizer"]) == count
    assert len(list(folder.iterdir())) == 2 * count + 2 and checkpoint.newest_complete(tmp_path) == folder


@pytest.mark.parametrize("name", ["weights-00002-of-00003.safetensors", "optimizer-00003-of-00003.safetensors"])
def test_a_missing_share_is_named(tmp_path: Path, name: str) -> None:
    with others(tmp_path, 3) as first:
        path = saved_by(tmp_path, first) / name
    path.unlink()
    assert fault_of(checkpoint.check, path.parent).where == str(path)
    with pytest.raises(UserError, match=name):
        checkpoint.read_weights(path.parent)["matrix"]
        checkpoint.read_moments(path.parent)["matrix"]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the disk be full where a file of this name is written."""
    write, full = tensor_file.write, set[str]()

    def writing(path: Path, tensors: Any) -> str:
        if path.name in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, tensors)

    monkeypatch.setattr(tensor_file, "write", writing)
    return lambda name: (full.clear(), full.add(name))[1]


@pytest.mark.parametrize("name", ["weights-00001-of-00003.safetensors", "optimizer-00002-of-00003.safetensors"])
def test_a_disk_that_refuses_one_share_leaves_nothing(tmp_path: Path, refuse: Callable[[str], None], name: str) -> None:
    with others(tmp_path, 3) as first:
        for _ in range(3):
            refuse(name)
            with pytest.raises(OSError, match=name) as full:
                saved_by(tmp_path, first)
            assert full.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())
        refuse("")
        for step in (10, 20, 10):  # a step that is saved again is replaced
            assert checkpoint.check(saved_by(tmp_path, first, step))
    assert checkpoint.all_steps(tmp_path) == [10, 20] and len(list(tmp_path.iterdir())) == 2


def test_nobody_writes_later(tmp_path: Path, refuse: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fails at once, another is slow: its late file must not come into the next attempt's folder."""
    write_share, ended = store.write_share, threading.Event()

    def slow(folder: Path, mine: Share, tensors: Any) -> Any:
        if mine.index:
            ended.wait(0.3)
        written = write_share(folder, mine, tensors)
        ended.set()
        return written

    monkeypatch.setattr(store, "write_share", slow)
    refuse("weights-00001-of-00002.safetensors")
    with others(tmp_path, 2) as first, pytest.raises(OSError):
        try:
            saved_by(tmp_path, first)
        finally:
            assert ended.is_set()


def test_a_folder_that_is_not_shared_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process has written is not what the first sees."""
    write_share = store.write_share

    def elsewhere(folder: Path, mine: Share, tensors: Any) -> Any:
        written = write_share(folder, mine, tensors)
        if mine.index:
            (folder / written["weights"].path).write_bytes(b"")
        return written

    monkeypatch.setattr(store, "write_share", elsewhere)
    with others(tmp_path, 2) as first, pytest.raises(OSError, match="shared") as refused:
        saved_by(tmp_path, first)
    assert refused.value.errno == errno.EIO and not list(tmp_path.iterdir())


def test_the_others_leave_where_the_first_is_gone(tmp_path: Path) -> None:
    leave = threading.Event()
    serving = threading.Thread(target=Writers(Share(1, 2), HashStore()).serve, args=(tmp_path, {}, leave))
    serving.start()
    leave.set()
    serving.join(5)
    assert not serving.is_alive()
