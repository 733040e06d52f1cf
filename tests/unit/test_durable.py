"""Files and folders get their name in one step, whoever is killed when; locks are held once, where there are any."""

import errno
import fcntl
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from zerokara.base import durable, file_lock


def replace(target: Path, content: str, keep: str = "") -> None:
    with durable.atomic_folder(target, keep) as partial:
        (partial / "file").write_text(content, encoding="utf-8")


def content(folder: Path) -> str:
    return (folder / "file").read_text(encoding="utf-8")


def test_a_folder_whose_deletion_was_ended_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a folder of work would be taken for all of it."""
    folder = tmp_path / "work"

    def ended(path: Path, **_: object) -> None:
        if path.exists():
            (path / "a").unlink()
            raise KeyboardInterrupt

    for name in ("a", "b"):
        durable.write_file(folder / name, name)
    with monkeypatch.context() as patched:
        patched.setattr(durable.shutil, "rmtree", ended)
        with pytest.raises(KeyboardInterrupt):
            durable.remove_folder(folder)
    assert not folder.exists() and [path.name for path in tmp_path.rglob("b")] == ["b"]
    durable.write_file(folder / "c", "c")
    durable.remove_folder(folder)
    durable.remove_folder(folder)
    assert not list(tmp_path.iterdir())
    durable.write_file(tmp_path / "scratch" / "d", "d")
    folder.symlink_to(tmp_path / "scratch")
    durable.remove_folder(folder)
    assert folder.is_dir() and not list(folder.iterdir()), "the link leads to an empty folder"
    durable.write_file(tmp_path / "file", "e")
    durable.remove_folder(tmp_path / "file")
    assert {path.name for path in tmp_path.iterdir()} == {"work", "scratch"}


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut could leave an empty file with the name of a whole one."""
    done: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, real=real, name=name: (done.append(name), real(*given))[1])
    durable.write_file(tmp_path / "file", "a")
    assert done == ["fsync", "replace", "fsync"], "the second is of the folder"


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    durable.write_file(path, "old")
    with pytest.raises(ValueError, match="stop"), durable.atomic_file(path) as file:
        file.write(b"half")
        raise ValueError("stop")
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


@pytest.mark.parametrize(("code", "is_named"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_a_full_disk_names_the_file_and_other_errors_do_not(tmp_path: Path, code: int, is_named: bool) -> None:
    """Another error may be that of a file that is read meanwhile."""
    path = tmp_path / "file.txt"
    with pytest.raises(OSError) as caught, durable.atomic_file(path):
        raise OSError(code, os.strerror(code))
    assert caught.value.filename == (str(path) if is_named else None)


def test_a_folder_appears_whole_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with durable.atomic_folder(target) as partial:
        (partial / "file").write_text("1", encoding="utf-8")
        assert not target.exists()
    with pytest.raises(ValueError, match="stop"), durable.atomic_folder(target) as partial:
        (partial / "b").write_text("2", encoding="utf-8")
        raise ValueError("stop")
    assert [p.name for p in target.iterdir()] == ["file"]
    replace(target, "3")
    assert content(target) == "3" and [p.name for p in tmp_path.rglob("*")] == ["out", "file"]


def test_a_fault_between_renames_gives_the_old_its_name_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "folder"
    replace(target, "old")
    rename = os.rename

    def refused(one: Path, other: Path) -> None:
        if one.name.endswith("folder.partial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(one))
        rename(one, other)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refused)
        with pytest.raises(OSError, match=r"folder\.partial"):
            replace(target, "new")
    assert content(target) == "old" and [path.name for path in tmp_path.iterdir()] == ["folder"]
    # Killed there: whoever comes next puts it back, before anything else is deleted.
    target.rename(tmp_path / "folder.old.partial")
    with pytest.raises(ValueError, match="stop"), durable.atomic_folder(target):
        raise ValueError("stop")
    assert content(target) == "old"
    # Killed behind it: the new one stands.
    (tmp_path / "folder.old.partial").mkdir()
    durable.recover(target)
    assert content(target) == "old" and [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_is_replaced_is_kept_where_it_is_wanted(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    for number in range(3):
        replace(target, str(number), keep=".old-")
    assert [content(tmp_path / name) for name in ("folder.old-1", "folder.old-2", "folder")] == ["0", "1", "2"]
    (tmp_path / "x.failed").mkdir()
    assert durable.unused_name(tmp_path / "x", ".failed").name == "x.failed-2"


def test_links_stay_links_and_permissions_stay(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    replace(tmp_path / "disk" / "there", "old")
    (tmp_path / "folder").symlink_to("disk/there")
    replace(tmp_path / "folder", "new")
    assert content(tmp_path / "disk" / "there") == "new" and (tmp_path / "folder").is_symlink()
    shared = tmp_path / "disk" / "config.yaml"
    durable.write_file(shared, "old")
    shared.chmod(0o600)
    (tmp_path / "config.yaml").symlink_to(shared)
    durable.write_file(tmp_path / "config.yaml", "new")
    assert (tmp_path / "config.yaml").is_symlink() and shared.read_text(encoding="utf-8") == "new"
    assert stat.S_IMODE(shared.stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.rglob("*")} == {"disk", "there", "file", "folder", "config.yaml"}


def test_new_parents_survive_a_power_cut_where_folders_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        synced: list[Path] = []
        patched.setattr(durable, "sync_folder", synced.append)
        durable.write_file(tmp_path / "a" / "b" / "file", "x")
        assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} == set(synced)
    code = errno.EINVAL

    def refused(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refused)
    durable.sync_folder(tmp_path)
    code = errno.EIO
    with pytest.raises(OSError, match=str(tmp_path)):
        durable.sync_folder(tmp_path)


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


def test_the_holder_of_another_machine_that_did_not_end_cleanly_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lock").write_bytes(b'{"pid": 7, "host": "node9"}')
    with file_lock.held(tmp_path / "lock") as is_ours:
        assert is_ours and "process 7 on node9 has not ended cleanly" in capsys.readouterr().out

    def end_cleanly() -> None:
        time.sleep(0.2)
        (tmp_path / "lock").unlink()
        file.close()

    with open(tmp_path / "lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b'{"pid": 7, "host": "node9"}')
        file.flush()
        threading.Thread(target=end_cleanly).start()
        with file_lock.held(tmp_path / "lock", 30.0) as is_ours:
            assert is_ours and not capsys.readouterr().out


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


def test_no_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
