"""Our .bin/.idx against megatron-core's own builder and reader, byte for byte, in both types of ids."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_examples import write_examples
from made_tokens import write_documents
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from zerokara.tokens.indexed import IndexedTokens, bin_path, dtype_for, idx_path

VOCABULARIES = {np.uint16: 65499, np.int32: 65500}


def _documents(vocab_size: int) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(7)
    lengths = [1, 2, 1000, *random.integers(1, 200, 50)]
    return [random.integers(0, vocab_size, length, dtype=np.int32) for length in lengths]


def _build(prefix: Path, documents: list[np.ndarray[Any, Any]], dtype: type, *, item_by_item: bool) -> None:
    builder = IndexedDatasetBuilder(str(bin_path(prefix)), dtype=dtype)
    for ids in documents:
        if item_by_item:
            builder.add_item(torch.from_numpy(ids))
            builder.end_document()
        else:
            builder.add_document(ids, [len(ids)])
    builder.finalize(str(idx_path(prefix)))


@pytest.mark.parametrize("item_by_item", [True, False])
@pytest.mark.parametrize("dtype", VOCABULARIES)
def test_our_files_are_megatron_s_and_each_reads_the_other_s(tmp_path: Path, dtype: type, item_by_item: bool) -> None:
    documents = _documents(VOCABULARIES[dtype])
    assert dtype_for(VOCABULARIES[dtype]) == dtype == DType.optimal_dtype(VOCABULARIES[dtype])
    write_documents(tmp_path / "ours", documents, np.dtype(dtype))
    _build(tmp_path / "theirs", documents, dtype, item_by_item=item_by_item)
    for path_of in (bin_path, idx_path):
        assert path_of(tmp_path / "ours").read_bytes() == path_of(tmp_path / "theirs").read_bytes()
    theirs, ours = IndexedDataset(str(tmp_path / "ours")), IndexedTokens(tmp_path / "ours")
    assert len(theirs) == len(ours) == len(documents)
    for i, ids in enumerate(documents):
        assert np.array_equal(theirs[i], ids) and np.array_equal(ours[i], ids)
    assert np.array_equal(theirs.document_indices, ours.document_indices)
    assert np.array_equal(theirs.sequence_lengths, ours.lengths)


EXAMPLES = [[[5, 6], [7, 2]], [[8], [9, 2], [5], [2]], [[], [4, 2], [3]]]


def test_examples_are_documents_of_several_sequences(tmp_path: Path) -> None:
    """Ours equal megatron-core's byte for byte, and its reader finds every segment, the empty one too."""
    write_examples(tmp_path / "ours", EXAMPLES)
    builder = IndexedDatasetBuilder(str(bin_path(tmp_path / "theirs")), dtype=np.uint16)
    for example in EXAMPLES:
        builder.add_document(np.concatenate([np.array(ids, int) for ids in example]), [len(ids) for ids in example])
    builder.finalize(str(idx_path(tmp_path / "theirs")))
    for path_of in (bin_path, idx_path):
        assert path_of(tmp_path / "ours").read_bytes() == path_of(tmp_path / "theirs").read_bytes()
    theirs, ours = IndexedDataset(str(tmp_path / "ours")), IndexedTokens(tmp_path / "ours")
    assert theirs.document_indices.tolist() == ours.document_indices.tolist() == [0, 2, 6, 9]
    assert len(ours) == 9 and ours.num_documents == 3
    assert [theirs[i].tolist() for i in range(9)] == [ids for example in EXAMPLES for ids in example]
    assert [ids.tolist() for i in range(3) for ids in ours.sequences(i)] == [theirs[i].tolist() for i in range(9)]
    as_documents = IndexedTokens(tmp_path / "theirs")
    assert len(as_documents) == 9 and as_documents.num_documents == 3
    assert as_documents.document_indices.tolist() == [0, 2, 6, 9]
    assert [as_documents[i].tolist() for i in range(9)] == [theirs[i].tolist() for i in range(9)]
