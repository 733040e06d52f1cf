"""Why a path cannot be written, found out without leaving anything there."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerokara import writable

NOBODY = 65534


def state(folder: Path) -> list[tuple[str, int]]:
    """All that lies in a folder, with its time of change, the folder itself too."""
    return [(str(path), path.lstat().st_mtime_ns) for path in sorted([folder, *folder.rglob("*")])]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a file, a folder and a link to nothing in it."""
    (tmp_path / "file").write_text("text", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    return tmp_path


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder that its user may only read, and a user without privileges: root may write anywhere."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        (folder / "inner").mkdir()
        for each in (folder / "inner", folder):
            each.chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(NOBODY)
        try:
            yield folder
        finally:
            os.seteuid(user)
            folder.chmod(0o755)


@pytest.mark.parametrize("name", ["", "folder", "new", "new/newer/newest", "x" * 200])
def test_where_something_can_be_written_there_is_no_reason_and_nothing_left(place: Path, name: str) -> None:
    before = state(place)
    assert writable.reason_against_folder(place / name) == ""
    assert writable.reason_against_entry(place / "folder" / name) == ""
    assert writable.reason_against_file(place / "new" / name / "file") == ""
    assert state(place) == before


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("file", "/file is a file"),
        ("file/below/it", "/file is a file"),
        ("link", "/link is a broken link"),
        ("link/below", "/link is a broken link"),
        ("n" * 250, "250 bytes"),
        (f"new/{'語' * 80}", "240 bytes"),
        ("n" * 300, os.strerror(errno.ENAMETOOLONG)),
        ("deep/" * 1000, os.strerror(errno.ENAMETOOLONG)),
    ],
)
def test_what_is_in_the_way_is_named(place: Path, name: str, fact: str) -> None:
    before = state(place)
    assert fact in writable.reason_against_folder(place / name)
    assert state(place) == before


@pytest.mark.parametrize("name", ["/proc/model", "/sys/model"])
def test_a_file_system_that_takes_no_files_is_told(name: str) -> None:
    for reason in (writable.reason_against_folder, writable.reason_against_file, writable.reason_against_entry):
        assert str(Path(name).parent) in reason(Path(name))


def test_a_file_may_be_replaced_and_a_folder_not_by_a_file(place: Path) -> None:
    assert writable.reason_against_file(place / "file") == "" == writable.reason_against_entry(place / "folder")
    assert "folder is a folder" in writable.reason_against_file(place / "folder")
    assert "file is a file" in writable.reason_against_file(place / "file" / "below")
    assert "240 bytes" in writable.reason_against_file(place / ("n" * 240))


def test_a_folder_in_which_the_user_may_not_write_is_told(unprivileged: Path) -> None:
    told = os.strerror(errno.EACCES)
    for path in (unprivileged, unprivileged / "new" / "newer", unprivileged / "inner" / "new"):
        assert told in writable.reason_against_folder(path), path
    assert told in writable.reason_against_file(unprivileged / "new")
    assert told in writable.reason_against_entry(unprivileged / "inner"), "the name stands in a folder that is closed"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_refusal_of_the_system_is_told_in_its_words(
    place: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    assert writable.reason_against_folder(place / "new").endswith(f"{place}: {os.strerror(number)}")


def test_where_no_nameless_file_can_be_a_named_one_is_made_and_removed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = [], os.open

    def as_on_nfs(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        made.append(path)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", as_on_nfs)
    assert writable.reason_against_folder(place / "new") == ""
    assert len(made) == 1 and sorted(path.name for path in place.iterdir()) == ["file", "folder", "link"]
