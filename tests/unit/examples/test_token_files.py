"""Token files of examples: segments, lengths, and a corpus that is none."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_tokens import write_documents

from zerokara.config.data import packed
from zerokara.errors import UserError
from zerokara.examples.example_files import ExampleTokens, example_writer
from zerokara.samples.packed_examples import PackedExamples
from zerokara.tokens.indexed import bin_path

EXAMPLES = [[[5, 6], [7, 2]], [[8], [9, 2], [5], [2]], [[], [4, 2], [3]]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with example_writer(tmp_path / "x", np.dtype(np.uint16)) as write:
        for example in EXAMPLES:
            write([np.array(ids, np.int32) for ids in example])
    return tmp_path / "x"


def test_what_is_written_is_read(prefix: Path) -> None:
    tokens = ExampleTokens(prefix)
    assert len(tokens) == 3
    assert [[ids.tolist() for ids in tokens.segments(i)] for i in range(3)] == EXAMPLES
    assert tokens.tokens.lengths.tolist() == [2, 2, 1, 2, 1, 1, 0, 2, 1]
    assert tokens.first_segments.tolist() == [0, 2, 6, 9]
    assert tokens.read_and_learned_lengths().tolist() == [[2, 2, 1], [2, 3, 2]]
    assert [tokens.prompt(i) for i in range(3)] == [[5, 6], [8, 9, 2, 5], []]


def test_token_files_of_a_corpus_are_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "x", [np.array([5, 2])], np.dtype(np.uint16))
    with pytest.raises(UserError, match="less than two segments"):
        ExampleTokens(tmp_path / "x")


@pytest.mark.parametrize("opens", [ExampleTokens, lambda prefix: PackedExamples(prefix, packed(8, 8, False), False, 0)])
def test_missing_and_damaged_files_are_made_by_step_7(prefix: Path, opens: Callable[[Path], object]) -> None:
    bin_path(prefix).write_bytes(b"")
    with pytest.raises(UserError, match="create it again: step 7 with --redo"):
        opens(prefix)
    bin_path(prefix).unlink()
    with pytest.raises(UserError, match="does not exist; create it with step 7"):
        opens(prefix)


def test_no_example_at_all(tmp_path: Path) -> None:
    with example_writer(tmp_path / "x", np.dtype(np.int32)):
        pass
    assert len(ExampleTokens(tmp_path / "x")) == 0
