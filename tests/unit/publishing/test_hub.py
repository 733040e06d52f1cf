"""The comparison of a remote listing with the local manifest, and names."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from zerokara.manifest import FileRecord
from zerokara.publishing import hub
from zerokara.publishing.hub import RemoteFile

CONTENT = b"0123456789"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
BLOB = "ad471007bd7f5983d273b9584e5629230150fd54"
"""`printf 0123456789 | git hash-object --stdin`."""


@pytest.fixture
def local(tmp_path: Path) -> tuple[Path, list[FileRecord]]:
    (tmp_path / "a").write_bytes(CONTENT)
    return tmp_path, [FileRecord(path="a", bytes=10, sha256=SHA256, modified_ns=0)]


def test_the_blob_id_is_gits(local: tuple[Path, list[FileRecord]]) -> None:
    assert hub.git_blob_id(local[0] / "a") == BLOB
    git = subprocess.run(["git", "hash-object", "a"], cwd=local[0], capture_output=True, text=True, check=True)
    assert git.stdout.strip() == BLOB


@pytest.mark.parametrize(
    ("remote", "path"),
    [
        ({"a": RemoteFile(10, BLOB, None)}, None),
        ({"a": RemoteFile(10, "pointer", SHA256)}, None),
        ({"a": RemoteFile(10, BLOB, None), ".gitattributes": RemoteFile(1, "x", None)}, None),
        ({}, "a"),
        ({"a": RemoteFile(11, BLOB, None)}, "a"),
        ({"a": RemoteFile(10, "other", None)}, "a"),
        ({"a": RemoteFile(10, BLOB, "other")}, "a"),
        ({"a": RemoteFile(10, BLOB, None), "b": RemoteFile(1, "x", None)}, "b"),
    ],
)
def test_differences(local: tuple[Path, list[FileRecord]], remote: dict[str, RemoteFile], path: str | None) -> None:
    found = [line.partition(":")[0] for line in hub.differences(*local, remote)]
    assert found == ([] if path is None else [path])


@pytest.mark.parametrize("name", ["me/first", "my-team/ja_1.3B"])
def test_right_names(name: str) -> None:
    assert hub.check_name(name) is None


@pytest.mark.parametrize("name", ["me/a--b", "me/a..b", "me/a.git", "a/b/c", "me/"])
def test_wrong_names(name: str) -> None:
    assert hub.check_name(name)
