from __future__ import annotations

import numpy as np

from zerokara.samples.objective import OBJECTIVES, objective


def test_causal_labels_are_the_inputs_one_further() -> None:
    tokens = np.array([[5, 6, 2, 7], [8, 2, 2, 9]])
    batch = OBJECTIVES["causal"](tokens, None)
    assert batch.inputs.tolist() == [[5, 6, 2], [8, 2, 2]]
    assert batch.labels.tolist() == [[6, 2, 7], [2, 2, 9]]
    assert batch.loss_mask.tolist() == [[1, 1, 1], [1, 1, 1]]  # the end of a document (2) counts as any token
    assert batch.inputs.flags.c_contiguous and batch.labels.flags.c_contiguous


def test_padding_does_not_count() -> None:
    tokens = np.array([[5, 6, 0, 0]])
    batch = OBJECTIVES["causal"](tokens, np.array([[True, True, False, False]]))
    assert batch.loss_mask.tolist() == [[1, 0, 0]]
    assert batch.loss_mask.dtype == np.float32


def test_segments_count_the_ends_that_are_read() -> None:
    tokens = np.array([[7, 8, 2, 5, 6, 2, 9], [2, 5, 5, 2, 2, 5, 2]])
    batch = objective("causal", isolate_at=2)(tokens, None)
    assert batch.segments is not None
    assert batch.segments.tolist() == [[0, 0, 1, 1, 1, 2], [1, 1, 1, 2, 3, 3]]  # the last is a label only
    plain = objective("causal")(tokens, None)
    assert plain.segments is None and plain.inputs.tolist() == batch.inputs.tolist()
