"""Token files of examples: segments, lengths, prompts, and files that are missing or damaged."""

from pathlib import Path

import pytest
from made_examples import write_examples

from zerokara.base.errors import UserError
from zerokara.config.data import packed
from zerokara.examples.example_files import prompt_of
from zerokara.samples.packed_examples import PackedExamples
from zerokara.tokens.indexed import IndexedTokens, bin_path

EXAMPLES = [[[5, 6], [7, 2]], [[8], [9, 2], [5], [2]], [[], [4, 2], [3]]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write_examples(tmp_path / "x", EXAMPLES)


def test_what_is_written_is_read(prefix: Path) -> None:
    tokens = IndexedTokens(prefix)
    assert tokens.num_documents == 3
    assert [[ids.tolist() for ids in tokens.sequences(i)] for i in range(3)] == EXAMPLES
    assert tokens.lengths.tolist() == [2, 2, 1, 2, 1, 1, 0, 2, 1]
    assert tokens.document_indices.tolist() == [0, 2, 6, 9]
    assert [prompt_of(tokens.sequences(i)) for i in range(3)] == [[5, 6], [8, 9, 2, 5], []]


def test_missing_and_damaged_files_are_made_by_step_7(prefix: Path) -> None:
    bin_path(prefix).write_bytes(b"")
    with pytest.raises(UserError, match="create it again: step 7 with --redo"):
        PackedExamples(prefix, packed(8, 8, False), False, 0)
    bin_path(prefix).unlink()
    with pytest.raises(UserError, match="does not exist; create it with step 7"):
        PackedExamples(prefix, packed(8, 8, False), False, 0)
