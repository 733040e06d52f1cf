"""Span corruption as in T5: no token is lost, every cut is equally likely, masked spans depend on the sample alone."""

from __future__ import annotations

from itertools import pairwise
from math import comb

import numpy as np
import pytest
from span_texts import merged

from zerokara.config.data import SampleLengths, with_spans
from zerokara.samples import spans

SENTINELS = np.arange(1000, 900, -1)
END = 2


def mask_of(*noise: int, length: int) -> np.ndarray:
    mask = np.zeros((1, length), dtype=bool)
    mask[0, list(noise)] = True
    return mask


def test_the_example_of_the_docstring() -> None:
    read, written = spans.corrupt(np.arange(10, 16)[None], mask_of(2, 3, 5, length=6), SENTINELS, END)
    assert read.tolist() == [[10, 11, 1000, 14, 999, END]]
    assert written.tolist() == [[1000, 12, 13, 999, 15, END]]


@pytest.mark.parametrize(("read_len", "density", "mean"), [(512, 0.15, 3.0), (64, 0.5, 1.0), (40, 0.3, 6.0)])
def test_both_sides_together_are_the_text_for_a_thousand_keys(read_len: int, density: float, mean: float) -> None:
    lengths = with_spans(read_len, density, mean)
    tokens = np.random.default_rng(1).integers(3, 900, (1000, lengths.raw))
    noise = spans.noise_mask(lengths, 7, np.arange(1000))
    sentinels = np.arange(10_000, 10_000 - lengths.num_spans, -1)
    read, written = spans.corrupt(tokens, noise, sentinels, END)
    assert read.shape == (1000, lengths.input) and written.shape == (1000, lengths.target)
    for row in range(1000):
        assert merged(read[row], written[row], sentinels, END).tolist() == tokens[row].tolist()
        assert [token for token in read[row] if token in sentinels] == sentinels.tolist()
        assert [token for token in written[row] if token in sentinels] == sentinels.tolist()


def runs_of(noise: np.ndarray) -> list[tuple[bool, int]]:
    edges = [0, *(np.flatnonzero(np.diff(noise.astype(int))) + 1).tolist(), len(noise)]
    return [(bool(noise[first]), end - first) for first, end in pairwise(edges)]


def test_spans_are_as_long_as_the_closed_form_says() -> None:
    """Of all ways to cut N into M parts, a part has length k in C(N − k − 1, M − 2) of C(N − 1, M − 1)."""
    lengths = with_spans(512, 0.15, 3)
    number, parts = 4000, lengths.num_spans
    noise = spans.noise_mask(lengths, 3, np.arange(number))
    assert (noise.sum(axis=1) == lengths.num_noise_tokens).all()
    for kind, total in ((True, lengths.num_noise_tokens), (False, lengths.raw - lengths.num_noise_tokens)):
        found = [length for row in noise for is_noise, length in runs_of(row) if is_noise is kind]
        assert len(found) == number * parts
        for k in (1, 2, 3, 5, 10):
            share = comb(total - k - 1, parts - 2) / comb(total - 1, parts - 1)
            deviation = (share * (1 - share) / len(found)) ** 0.5
            assert found.count(k) / len(found) == pytest.approx(share, abs=5 * deviation), (kind, k)
    # Every text begins with what is kept and ends in noise; far from both each place is as likely as its neighbours.
    assert not noise[:, 0].any() and noise[:, -1].all()
    middle = noise[:, 100:468].mean(axis=0)
    assert middle.mean() == pytest.approx(lengths.num_noise_tokens / lengths.raw, rel=0.03)
    assert abs(middle - middle.mean()).max() < 5 * (0.15 * 0.85 / number) ** 0.5


def test_gaps_belong_to_the_seed_and_the_key_alone() -> None:
    lengths = with_spans(64, 0.15, 3)
    keys = np.array([5, 999, 2**40, 0])
    together = spans.noise_mask(lengths, 1, keys)
    for key, row in zip(keys, together, strict=True):
        assert np.array_equal(spans.noise_mask(lengths, 1, np.array([key]))[0], row)
    assert not np.array_equal(spans.noise_mask(lengths, 2, keys), together)
    masks = {row.tobytes() for row in spans.noise_mask(lengths, 1, np.arange(500))}
    assert len(masks) > 480  # of 61,596 that there are


def test_a_single_gap() -> None:
    lengths = SampleLengths(raw=5, input=5, target=4, num_noise_tokens=2, num_spans=1)
    noise = spans.noise_mask(lengths, 1, np.arange(3))
    assert noise.tolist() == [[False, False, False, True, True]] * 3
