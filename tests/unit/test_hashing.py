"""Hashes of many files at once, with progress where they take long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerokara import hashing, progress


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    for name, content in (("a", b"one"), ("b", b"two" * 1000), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
    files = sorted(tmp_path.iterdir())
    expected = {hashing.file_key(path): hashing.sha256_of(path) for path in files}
    assert hashing.hash_files([*files, files[0]]) == expected
    with hashing.BackgroundHashes(files) as background:
        assert background.result() == expected
    assert hashing.hash_files([]) == {}


def test_a_key_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    before = hashing.file_key(path)
    assert before == hashing.file_key(path)
    os.utime(path, ns=(0, 1))
    assert before != hashing.file_key(path)


def test_progress_is_shown_only_where_it_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 64 * 2**20)
    monkeypatch.setattr(hashing, "QUIET_SECONDS", 60)
    hashing.hash_files([path])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(hashing, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.0)
    hashing.hash_files([path])
    assert "67.1 MB of 67.1 MB (100%)" in capsys.readouterr().err


@pytest.mark.parametrize("quiet_seconds", [0.0, 60])
def test_a_file_that_cannot_be_read_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_seconds: float
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(hashing, "QUIET_SECONDS", quiet_seconds)
    with pytest.raises(OSError, match="Input/output error"):
        hashing.hash_files([tmp_path / "file", Path("/proc/self/mem")])
