"""A disk that fails to read, to write, to rename or to sync: no good checkpoint is lost, and the run continues.

The life of a run's checkpoints (saves, deletions, two restarts), by the code that saves and restarts, on tensors of a
few bytes. An error befalls each request for a file in turn: once, as when a server restarts, or for good, as on a bad
sector, until the next start.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from made_checkpoints import state_of

from zerokara import checkpoint
from zerokara.base.errors import RunError
from zerokara.checkpoint import folders
from zerokara.checkpoint.store import CheckpointStore, Writers
from zerokara.config.engine import MonitoringSettings

INJECTIONS_PER_KILL = 4
LOSSES = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.6, 10: 2.7, 12: 2.8}
"""Validation loss of each save: the best is soon the oldest."""
RESTARTS = (8, 12)
SETTINGS = MonitoringSettings(keep_last=2)
NAMES = ("open", "rename", "replace", "stat", "listdir", "scandir", "mkdir", "unlink", "rmdir", "fsync", "write")
"""Functions of `os`; reading and `builtins.open` come to them."""
_OPEN = io.open


@dataclass
class FailingDisk:
    """Counts what is asked of the files below a folder, and lets one request fail, or all of one file from there on."""

    folder: Path
    at: int = -1
    """Number of the request that fails, counted from 0; none where it is negative."""
    errno: int = 0
    lasting: bool = False
    """True if all later requests about the same file fail too, until `heal`."""
    asked: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failed: str = ""
    """The request that failed: its kind and the file's name."""
    _bad: str = ""

    def heal(self) -> None:
        """Let requests about the file that failed succeed again."""
        self._bad, self.at = "", -1 if self.failed else self.at

    def ask(self, kind: str, path: object) -> None:
        """Count a request; `path` may be a descriptor.

        Raises:
            OSError: it is the one that fails.
        """
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)  # type: ignore[call-overload]
        if not str(name).startswith(f"{self.folder}"):
            return
        self.asked += 1
        self.kinds[kind] += 1
        if self.asked - 1 == self.at or (self.lasting and name == self._bad):
            self._bad = self._bad or str(name)
            self.failed = self.failed or f"{kind} {Path(str(name)).relative_to(self.folder)}"
            raise OSError(self.errno, os.strerror(self.errno), str(name))

    @contextlib.contextmanager
    def inserted(self) -> Iterator[None]:
        """Let this process use the disk, as long as the block lasts; what is synced is only counted."""
        with contextlib.ExitStack() as patches:
            for name in NAMES:
                real = (lambda descriptor: None) if name == "fsync" else getattr(os, name)
                patches.enter_context(mock.patch.object(os, name, self._asking(name, real)))
            for module in (builtins, io):
                patches.enter_context(mock.patch.object(module, "open", self._opening))
            yield

    def _asking(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def asking(path: Any, *arguments: Any, **named: Any) -> Any:
            above = named.get("dir_fd")
            self.ask(kind, path if above is None else os.path.join(os.readlink(f"/proc/self/fd/{above}"), path))
            return real(path, *arguments, **named)

        return asking

    def _opening(self, path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if isinstance(path, int):
            return _OPEN(path, mode, *arguments, **named)
        self.ask("open", path)
        return _File(_OPEN(path, mode, *arguments, **named), os.fspath(path), self)


class _File:
    def __init__(self, file: Any, path: str, disk: FailingDisk):
        self._file, self._path, self._disk = file, path, disk

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        if name in ("read", "readinto", "write"):
            self._disk.ask(name.removesuffix("into"), self._path)
        return getattr(self._file, name)


class Life:
    """A run's checkpoints, and what was promised of them."""

    def __init__(self, run_dir: Path, disk: FailingDisk):
        self.run_dir, self.disk = run_dir, disk
        self.log: list[str] = []
        self.saved: list[int] = []
        """Steps whose checkpoint was saved, on the way that led here."""
        self.resumed: Path | None = None
        self.restarted: set[int] = set()

    def live(self) -> None:
        step = 0
        while step < max(LOSSES):
            step += 2
            self.save(step)
            if step in RESTARTS and step not in self.restarted:
                self.restarted.add(step)
                step = self.restart()

    def save(self, step: int) -> None:
        store = CheckpointStore(self.run_dir, SETTINGS, self.log.append, self.resumed, Writers(), num_bytes=16)
        state, weights = state_of(step, LOSSES[step]), {"a": torch.full((2,), float(step))}
        for attempt in range(6):  # as the thread that writes does, every few seconds
            try:
                with self.disk.inserted():
                    store.save(state, weights, {"a.exp_avg": torch.zeros(2)})
                break
            except OSError:
                self.require_nothing_lost()
                if attempt == 4:
                    self.disk.heal()
        else:
            raise AssertionError("the disk was healed, and it could not be saved")
        self.saved.append(step)
        self.require_nothing_lost()

    def restart(self) -> int:
        """A start of the process; where it is refused, the disk is healed and the same command given again."""
        newest = self.saved[-1]
        try:
            with self.disk.inserted():
                self.resumed = checkpoint.newest_to_resume(self.run_dir, self.log.append)
        except (RunError, OSError):
            self.require_nothing_lost()
            self.disk.heal()
            self.resumed = checkpoint.newest_to_resume(self.run_dir, self.log.append)
        self.require_nothing_lost()
        self.disk.heal()
        reached = checkpoint.read_state(self.resumed).step
        if reached != newest:  # only if it is logged, and the other is kept
            assert any(f"{self.run_dir}/global_step{newest} as " in line for line in self.log)
        self.saved = [step for step in self.saved if step <= reached]
        return reached

    def require_nothing_lost(self) -> None:
        """See that what is to be kept of what was saved is there, whole, under whatever name."""
        whole = set[int]()
        for folder in self.run_dir.glob("global_step*"):
            if ".partial" not in folder.name:
                checkpoint.check(folder)
                whole.add(checkpoint.read_state(folder).step)
        best = min(self.saved, key=lambda step: LOSSES[step], default=None)
        expected = {*self.saved[-SETTINGS.keep_last :], best} - {None}
        assert expected <= whole, f"{expected - whole} is lost after {self.disk.failed}: {self.log}"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "RETRY_PAUSES_SECONDS", (0.0, 0.0))


@pytest.mark.slow
def test_no_good_checkpoint_is_lost_to_a_failing_disk(tmp_path: Path, num_kills: int) -> None:
    unharmed = FailingDisk(tmp_path / "run")
    unharmed.folder.mkdir()
    Life(unharmed.folder, unharmed).live()
    kept = {path.name for path in unharmed.folder.iterdir()}
    assert kept == {"global_step4", "global_step10", "global_step12", "latest", "best"}
    assert {"open", "read", "rename", "replace", "fsync", "stat", "unlink", "write"} <= unharmed.kinds.keys()
    shutil.rmtree(unharmed.folder)
    kinds = [(code, lasting) for code in (errno.EIO, errno.ESTALE) for lasting in (False, True)]
    number = INJECTIONS_PER_KILL * num_kills
    tried = [(at * unharmed.asked // number, *kinds[at % len(kinds)]) for at in range(number)]
    for at, code, lasting in tried:
        disk = FailingDisk(tmp_path / "run", at, code, lasting)
        disk.folder.mkdir()
        life = Life(disk.folder, disk)
        life.live()
        assert disk.failed
        disk.heal()
        newest = checkpoint.newest_to_resume(disk.folder)
        checkpoint.write_markers(disk.folder)
        assert newest == disk.folder / "global_step12", disk.failed
        left = {path.name for path in disk.folder.iterdir()} - kept
        assert not [name for name in left if ".broken" not in name and not name.startswith("global_step")], left
        shutil.rmtree(disk.folder)
