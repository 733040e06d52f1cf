"""Files at addresses, by the file system that `fsspec` keeps in memory: the documents of the same files on a disk."""

import gzip
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from configs import fault_of
from corpus_files import json_lines, parquet
from fsspec.registry import known_implementations

from zerokara.base.errors import Fault, UserError
from zerokara.corpus.find import InputFile, check_unchanged, find_files
from zerokara.corpus.format_check import check_formats
from zerokara.corpus.read import Document, ranges, read
from zerokara.corpus.remote import _found

POEMS = [f"poem {i}" for i in range(600)]


FILES = {
    "data/a.jsonl": json_lines(POEMS[:300]),
    "data/sub/b.jsonl.gz": gzip.compress(json_lines(POEMS[300:500])),
    "data/sub/c.parquet": parquet(10, text=POEMS[500:]),
    "data/d.jsonl.xz": b"packed otherwise",
    "data/README.txt": b"about it",
    "data/.cache/e.jsonl": json_lines(["hidden"]),
    "data/tokens_quarantine.jsonl": b"our own",
}


@pytest.fixture
def store() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    for name, content in FILES.items():
        files.pipe(f"/poems/{name}", content)
    yield files
    files.rm("/poems", recursive=True)


def _documents(files: list[InputFile], size: int = 1000) -> list[str]:
    parts = ranges(pickle.loads(pickle.dumps(files)), size, "line")
    return [item.text for part in parts for item in read(part, "text", "line") if isinstance(item, Document)]


def _fault(entry: str) -> Fault:
    return fault_of(find_files, [entry], "config.yaml:3")


@pytest.mark.usefixtures("store")
def test_a_folder_gives_the_documents_of_the_same_files_on_a_disk(capsys: pytest.CaptureFixture[str]) -> None:
    files, names = find_files(["memory://poems/data"], ""), ("a.jsonl", "sub/b.jsonl.gz", "sub/c.parquet")
    expected = [(f"memory:///poems/data/{name}", len(FILES[f"data/{name}"])) for name in names]
    assert [(file.name, file.bytes) for file in files] == expected
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("data/.cache:", "README.txt", "tokens_quarantine.jsonl", "d.jsonl.xz"))
    check_formats(files, "text", "line", "")
    check_unchanged(files)
    assert [_documents(files, size) for size in (1000, 1 << 20)] == [POEMS, POEMS]


@pytest.mark.usefixtures("store")
def test_what_an_entry_may_name(tmp_path: Path) -> None:
    assert len(find_files(["memory://poems/data/**/*.jsonl*"], "")) == 2
    named = ["memory://poems/data/README.txt", "memory://poems/data/a.jsonl"]
    assert [(file.source, file.format) for file in find_files(named, "")] == [(0, "txt"), (1, "jsonl")]
    (tmp_path / "list.txt").write_text("memory://poems/data/sub\n", encoding="utf-8")
    assert len(find_files([f"@{tmp_path}/list.txt"], "")) == 2
    with pytest.raises(UserError, match="which memory://poems/data names already"):
        find_files(["memory://poems/data", "memory://poems/data/sub/*.gz"], "")


@pytest.mark.usefixtures("store")
def test_what_is_not_there_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "/poems/data holds README.txt, a.jsonl, " in _fault("memory://poems/data/nothing").rule
    assert "it holds README.txt" in _fault("memory://poems/data/README*").remedy
    assert "of a format known here: .jsonl" in _fault("memory://poems/data/d.jsonl.xz").rule
    assert "protocol" in _fault("nowhere://poems/data").rule
    with monkeypatch.context() as without:
        without.setitem(known_implementations, "s9", {"class": "not_installed.X", "err": "get it"})
        missing = _fault("s9://poems/data")
    assert "not_installed" in missing.rule and f'not_installed "fsspec=={fsspec.__version__}"' in missing.remedy


@pytest.mark.parametrize("entry", ["s3://ada:pass-word@poems/data", "https://poems.org/a.jsonl?X-Amz-Signature=0a1b"])
def test_an_address_with_a_secret_is_refused_without_telling_it(entry: str) -> None:
    text = str(_fault(entry))
    assert "kept in files" in text and "pass-word" not in text and "0a1b" not in text


@pytest.mark.parametrize("changed", [POEMS[1:301], POEMS[299::-1]], ids=["other size", "same size"])
def test_a_file_that_changed_is_not_read_as_another(store: Any, changed: list[str]) -> None:
    (file,) = find_files(["memory://poems/data/a.jsonl"], "")
    store.pipe("/poems/data/a.jsonl", json_lines(changed))
    with pytest.raises(OSError, match="changed since it was listed") as raised:
        _documents([file])
    assert raised.value.filename == "memory:///poems/data/a.jsonl"


@pytest.mark.parametrize("given", [b"", b"x" * 5000])
def test_an_answer_of_another_length_is_an_error(store: Any, given: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    files = find_files(["memory://poems/data/a.jsonl"], "")
    monkeypatch.setattr(type(store.open("/poems/data/a.jsonl")), "read", lambda self, size: given)
    with pytest.raises(OSError, match="reading bytes 0 to") as raised:
        _documents(files)
    assert f"{len(given):,} bytes where" in str(raised.value.strerror)


@pytest.mark.parametrize("key", ["Last-Modified", "modificationTime", "modify", "sha", "Content-MD5", "ETag"])
def test_what_a_server_tells_of_the_content_is_its_id(store: Any, key: str) -> None:
    """The names that fsspec's packages for HTTP, WebHDFS, FTP and GitHub give to it."""
    ids = {_found(store, {"name": "/a.jsonl", "size": 5, key: value}).sha256 for value in ("first", "second")}
    assert ids == {f"{key.lower()}:first", f"{key.lower()}:second"}
