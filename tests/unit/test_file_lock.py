"""File locks: held once, with their holder's name, released, and not needed where a file system has none."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from zerokara import file_lock


def test_a_lock_is_held_once_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"of a process that was killed, which wrote more than this one does" * 9)
    with file_lock.held(path) as first:
        assert first and file_lock.read_holder(path) == file_lock.Holder(os.getpid(), os.uname().nodename)
        with file_lock.held(path) as second:
            assert not second
        assert path.exists()
    assert not path.exists()
    assert file_lock.read_holder(path) is None


def test_the_file_is_open_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS locks nothing else: neither a folder nor what is open to be read only."""
    flock = fcntl.flock

    def as_nfs(file: object, operation: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:  # type: ignore[arg-type]
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", as_nfs)
    with file_lock.held(tmp_path / "lock") as is_ours:
        assert is_ours


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(file: object, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refused)
    code = errno.ENOLCK
    with file_lock.held(tmp_path / "lock") as is_ours:
        assert is_ours
    assert capsys.readouterr().out.count(str(tmp_path)) == 1
    code = errno.EIO
    with pytest.raises(OSError, match=str(tmp_path)), file_lock.held(tmp_path / "lock"):
        raise AssertionError("it must not begin")
