from __future__ import annotations

import numpy as np

from zerokara.config.sample_lengths import causal
from zerokara.samples.objective import Causal

KEYS = np.arange(2)


def test_causal_labels_are_the_inputs_one_further() -> None:
    tokens = np.array([[5, 6, 2, 7], [8, 2, 2, 9]])
    batch = Causal(causal(3))(tokens, KEYS)
    assert batch.inputs.tolist() == [[5, 6, 2], [8, 2, 2]]
    assert batch.labels.tolist() == [[6, 2, 7], [2, 2, 9]]
    assert batch.loss_mask.tolist() == [[1, 1, 1], [1, 1, 1]]  # the end of a document (2) counts as any token
    assert batch.inputs.flags.c_contiguous and batch.labels.flags.c_contiguous


def test_padding_does_not_count() -> None:
    tokens = np.array([[5, 6, 0, 0]])
    batch = Causal(causal(3))(tokens, KEYS, np.array([[True, True, False, False]]))
    assert batch.loss_mask.tolist() == [[1, 0, 0]]
    assert batch.loss_mask.dtype == np.float32


def test_segments_count_the_ends_that_are_read() -> None:
    tokens = np.array([[7, 8, 2, 5, 6, 2, 9], [2, 5, 5, 2, 2, 5, 2]])
    batch = Causal(causal(6), isolate_at=2)(tokens, KEYS)
    assert batch.segments is not None
    assert batch.segments.tolist() == [[0, 0, 1, 1, 1, 2], [1, 1, 1, 2, 3, 3]]  # the last is a label only
    plain = Causal(causal(6))(tokens, KEYS)
    assert plain.segments is None and plain.inputs.tolist() == batch.inputs.tolist()
