"""The comparison of a remote listing with the local manifest."""

import hashlib
from pathlib import Path

import pytest
from huggingface_hub.hf_api import RepoFile

from zerokara.manifest import FileRecord
from zerokara.publishing import hub

CONTENT = b"0123456789"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
BLOB = "ad471007bd7f5983d273b9584e5629230150fd54"
"""`printf 0123456789 | git hash-object --stdin`."""


@pytest.fixture
def local(tmp_path: Path) -> tuple[Path, list[FileRecord]]:
    (tmp_path / "a").write_bytes(CONTENT)
    return tmp_path, [FileRecord(path="a", bytes=10, sha256=SHA256, modified_ns=0)]


def remote_file(size: int, oid: str, sha256: str | None = None) -> RepoFile:
    outside_git = {"size": size, "oid": sha256, "pointerSize": 1} if sha256 else None
    return RepoFile(path="", size=size, oid=oid, lfs=outside_git)


@pytest.mark.parametrize(
    ("remote", "path"),
    [
        ({"a": remote_file(10, BLOB)}, None),
        ({"a": remote_file(10, "pointer", SHA256)}, None),
        ({"a": remote_file(10, BLOB), ".gitattributes": remote_file(1, "x")}, None),
        ({}, "a"),
        ({"a": remote_file(11, BLOB)}, "a"),
        ({"a": remote_file(10, "other")}, "a"),
        ({"a": remote_file(10, BLOB, "other")}, "a"),
        ({"a": remote_file(10, BLOB), "b": remote_file(1, "x")}, "b"),
    ],
)
def test_differences(local: tuple[Path, list[FileRecord]], remote: dict[str, RepoFile], path: str | None) -> None:
    found = [line.partition(":")[0] for line in hub.differences(*local, remote)]
    assert found == ([] if path is None else [path])
