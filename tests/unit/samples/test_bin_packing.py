import numpy as np
import pytest

from zerokara.samples.bin_packing import Rows, pack, target_length

NUM = 20_000


def skewed(mean: float, spread: float, seed: int, longest: int = 512) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - spread**2 / 2, spread, NUM)
    return np.clip(np.round(drawn), 1, longest).astype(np.int64)


def padding(packing: Rows, lengths: np.ndarray, capacity: int) -> float:
    """Share of padding, counted by hand; each example lies in one row, and no row overflows."""
    used = [int(lengths[row].sum()) for row in packing]
    assert sorted(np.concatenate(packing).tolist()) == list(range(len(lengths))) and max(used) <= capacity
    return 1 - sum(used) / (capacity * len(used))


def test_the_example_of_the_docstring() -> None:
    assert sorted(row.tolist() for row in pack([3, 5, 4, 2, 2], 8)) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(
    "lengths", [skewed(60, 0.6, 1), np.random.default_rng(2).integers(1, 513, NUM)], ids=["skewed", "uniform"]
)
def test_less_than_a_hundredth_of_a_decoders_rows_is_padding(lengths: np.ndarray) -> None:
    assert padding(pack(lengths, 512), lengths, 512) < 0.01


def near(lengths: np.ndarray) -> np.ndarray:
    return np.clip(np.round(lengths * np.random.default_rng(3).normal(1.1, 0.05, NUM)), 1, 512).astype(np.int64)


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (skewed(60, 0.6, 1), near(skewed(60, 0.6, 1))),
        (skewed(60, 0.6, 1), np.full(NUM, 2)),
        (skewed(15, 0.8, 8), np.full(NUM, 2)),
        (np.random.default_rng(4).integers(1, 513, NUM), np.random.default_rng(5).integers(1, 257, NUM)),
        (skewed(120, 0.6, 6), skewed(30, 0.5, 7, longest=128)),
    ],
    ids=["like_lengths", "labels", "labels_of_short_texts", "uniform", "summaries"],
)
def test_less_than_a_tenth_of_an_encoder_decoders_rows_is_padding(inputs: np.ndarray, targets: np.ndarray) -> None:
    length = target_length(inputs, targets, 512)
    assert length % 8 == 0 and length >= targets.max()
    packing = pack(inputs, 512, targets, length)
    read, written = padding(packing, inputs, 512), padding(packing, targets, length)
    assert (512 * read + length * written) / (512 + length) < 0.1


def test_it_is_a_function_of_the_seed() -> None:
    lengths = skewed(60, 0.6, 1)[:2000]
    pairs = lengths, 512, near(skewed(60, 0.6, 1))[:2000], 576
    for packed in (lambda seed: pack(lengths, 512, seed=seed), lambda seed: pack(*pairs, seed)):
        first, again, other = (np.concatenate(packed(seed)) for seed in (1, 1, 2))
        assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_no_examples_make_no_rows() -> None:
    assert pack([], 8) == pack([], 8, [], 8) == []
