"""Token files: the worked example of the docstring, reading, counting, damaged files, and whose they are."""

import re
from pathlib import Path

import numpy as np
import pytest
from made_tokens import write_documents

from zerokara.base import manifest
from zerokara.base.errors import UserError
from zerokara.tokens import indexed
from zerokara.tokens.indexed import (
    IndexedTokens,
    TokenPaths,
    bin_path,
    check_belongs,
    idx_path,
    open_splits,
    write_index,
)

DOCUMENTS = [np.array([5, 6, 2]), np.array([7, 2])]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_documents(tmp_path / "a.b_text_document", DOCUMENTS, np.dtype(np.uint16))
    return tmp_path / "a.b_text_document"


def test_the_worked_example(prefix: Path) -> None:
    text = re.sub(r"\s+", " ", indexed.__doc__ or "")
    found = re.search(r"as uint16 are ``\.bin`` (?P<bin>[0-9a-f ]+) and ``\.idx`` (?P<idx>.*?)\. Source", text)
    assert found, "the docstring has no example any more"
    index = re.sub(r"lengths|offsets|documents|[^0-9a-f]", "", re.sub("lengths|offsets|documents", "", found["idx"]))
    assert bin_path(prefix).read_bytes().hex() == found["bin"].replace(" ", "")
    assert idx_path(prefix).read_bytes().hex() == index
    tokens = IndexedTokens(prefix)
    assert tokens.tokens.tolist() == [5, 6, 2, 7, 2] and tokens.pointers.tolist() == [0, 6]
    assert tokens[1].tolist() == [7, 2]


def test_nothing_at_all(tmp_path: Path) -> None:
    write_documents(tmp_path / "x", [], np.dtype(np.uint16))
    tokens = IndexedTokens(tmp_path / "x")
    assert len(tokens) == 0 and tokens.tokens.size == 0 and tokens.document_indices.tolist() == [0]


@pytest.mark.parametrize(
    ("which", "damage", "message"),
    [
        (bin_path, lambda content: content[:-1], r"\.bin: is 9 bytes long; .*\.idx says 10"),
        (bin_path, lambda content: content + b"\0", "is 11 bytes long"),
        (idx_path, lambda content: content[:-8], "is 74 bytes long; its header says 82"),
        (idx_path, lambda content: content[:20], "does not start as a Megatron index does"),
        (idx_path, lambda content: b"X" + content[1:], "does not start as a Megatron index does"),
        (idx_path, lambda content: content[:9] + b"\2" + content[10:], "has version 2 and type 8"),
        (idx_path, lambda content: content[:17] + b"\6" + content[18:], "has version 1 and type 6"),
    ],
)
def test_damaged_files_are_refused(prefix: Path, which, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    path = which(prefix)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message) as raised:
        IndexedTokens(prefix)
    assert "step 2 with --redo" in str(raised.value)


@pytest.mark.parametrize("which", [bin_path, idx_path])
def test_missing_files_are_named(prefix: Path, which) -> None:  # type: ignore[no-untyped-def]
    which(prefix).unlink()
    with pytest.raises(UserError, match=f"{re.escape(str(which(prefix)))}: does not exist; create it with step 2"):
        IndexedTokens(prefix)


def test_splits_are_opened_without_reading_their_ids(tmp_path: Path) -> None:
    paths = TokenPaths(str(tmp_path / "x"))
    with open(idx_path(paths.train), "wb") as file:
        write_index(file, np.full(1000, 1_000_000, dtype=np.int32), np.dtype("u2"), np.arange(1001))
    with open(bin_path(paths.train), "wb") as file:
        file.truncate(2_000_000_000)  # sparse: 2 GB long, nothing on the disk
    train, valid = open_splits(paths.output_prefix)
    assert (train.num_documents, len(train.tokens), train.tokens.nbytes) == (1000, 10**9, 2 * 10**9)
    assert valid is None
    write_documents(paths.valid, DOCUMENTS, np.dtype("u2"))
    _, valid = open_splits(paths.output_prefix)
    assert valid is not None and (valid.num_documents, len(valid.tokens), valid.tokens.nbytes) == (2, 5, 10)
    idx_path(paths.valid).unlink()
    with pytest.raises(UserError, match="does not exist"):
        open_splits(paths.output_prefix)


def test_token_files_belong_to_one_tokenizer(tmp_path: Path) -> None:
    paths = TokenPaths(str(tmp_path / "x"))
    with pytest.raises(UserError, match="there is no manifest here"):
        check_belongs(paths.output_prefix, "a" * 64)
    write_documents(paths.train, DOCUMENTS, np.dtype("u2"))
    outputs = {"tokens": bin_path(paths.train)}
    manifest.write(paths.manifest, manifest.StepSpec("tokenize", {}), outputs, {"tokenizer_sha256": "a" * 64}, 0.0)
    assert check_belongs(paths.output_prefix, "a" * 64).step == "tokenize"
    with pytest.raises(UserError, match=f"{'a' * 64}.*{'b' * 64}.*step 2 with --redo"):
        check_belongs(paths.output_prefix, "b" * 64)
