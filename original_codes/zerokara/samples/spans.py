"""Span corruption (Raffel et al., 2020): a raw text → the encoder's input and the decoder's target.

Of n tokens N are noise, in M masked spans; both follow from the length (`config.data`), so that all samples
have the same lengths. A text begins with a span that is kept, then a masked one, and so on in turn; every way to cut
the N noise tokens into M spans, and the others into M, is equally likely. The encoder input is the text with a sentinel
token in place of each masked span, and an end token; the decoder target is each sentinel followed by the tokens of its
span, and an end token.

Example, N = 3, M = 2, sentinels X Y, end E: a b c d e f with c d and f masked gives the encoder input a b X e Y E and
the decoder target X c d Y f E.

Everything is a function of the seed and the sample's key: SplitMix64 (`order.mix`) draws a number for each position at
which a span could end, and the spans end at the M − 1 smallest.

Shapes: b samples, n raw tokens each, S of encoder input, T of decoder target.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zerokara.config.data import SampleLengths
from zerokara.samples.order import GOLDEN, mix, mix_many

Ids = NDArray[np.int64]


def corrupt(tokens: Ids, noise: NDArray[np.bool_], sentinels: Ids, end_id: int) -> tuple[Ids, Ids]:
    """Encoder inputs [b, S] and decoder targets [b, T] of `tokens` [b, n], `noise` as `noise_mask` gives it.

    `sentinels` are the ids of <extra_id_0>, <extra_id_1>, …, at least as many as there are spans.
    """
    return _with_sentinels(tokens, noise, sentinels, end_id), _with_sentinels(tokens, ~noise, sentinels, end_id)


def noise_mask(lengths: SampleLengths, seed: int, keys: Ids) -> NDArray[np.bool_]:
    """True where a token is noise, [b, n], for samples of these keys."""
    kept = _span_lengths(lengths.raw - lengths.num_noise_tokens, lengths.num_spans, seed, keys, stream=0)
    noise = _span_lengths(lengths.num_noise_tokens, lengths.num_spans, seed, keys, stream=1)
    in_turn = np.stack([kept, noise], axis=2).reshape(len(keys), 2 * lengths.num_spans)
    changes = np.zeros((len(keys), lengths.raw), dtype=np.int64)
    begins = np.cumsum(in_turn, axis=1)[:, :-1]
    np.put_along_axis(changes, begins, 1, axis=1)
    return np.cumsum(changes, axis=1) % 2 == 1


def _with_sentinels(tokens: Ids, masked: NDArray[np.bool_], sentinels: Ids, end_id: int) -> Ids:
    """The tokens that are not masked, a sentinel in place of each masked span, and the end token."""
    first = masked.copy()
    first[:, 1:] &= ~masked[:, :-1]
    number = np.cumsum(first, axis=1) - 1
    replaced = np.where(first, sentinels[np.maximum(number, 0)], tokens)
    rest = replaced[~masked | first].reshape(len(tokens), -1)  # as many in each sample
    return np.concatenate([rest, np.full((len(tokens), 1), end_id, dtype=np.int64)], axis=1)


def _span_lengths(num_tokens: int, num_spans: int, seed: int, keys: Ids, stream: int) -> Ids:
    """Lengths, at least 1 each, of `num_spans` spans of `num_tokens` together, [b, M]; any split is as likely."""
    if num_spans == 1:
        return np.full((len(keys), 1), num_tokens, dtype=np.int64)
    drawn = _draws(seed, keys, stream, num_tokens - 1)
    cuts = np.sort(np.argpartition(drawn, num_spans - 2, axis=1)[:, : num_spans - 1], axis=1) + 1
    edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, num_tokens)))
    return np.diff(edges, axis=1).astype(np.int64)


def _draws(seed: int, keys: Ids, stream: int, number: int) -> NDArray[np.uint64]:
    """Pseudo-random 64-bit numbers of a seed, a key and a stream, [b, number]."""
    of_seed = np.uint64(mix(mix(seed + GOLDEN) + stream))
    of_key = mix_many(keys.astype(np.uint64) ^ of_seed)
    steps = np.arange(1, number + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return mix_many(of_key[:, None] + steps)
