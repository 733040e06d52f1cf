"""Span corruption (Raffel et al., 2020): gaps in a text, and what stands in them.

Of n tokens N are noise, in M spans; both are fixed by the length (`config.sample_lengths`), so that every sample is as
long as the other. A text begins with a span that is kept, then noise, and so on by turns; each way to cut the N noise
tokens into M spans, and the others into M, is as likely as any other. The encoder reads what is kept, each noise span
replaced by a sentinel of its own, and an end; the decoder writes each sentinel, the noise that it stands for, and an
end. Put together again they are the text (`merged`).

Example, N = 3, M = 2, sentinels X Y, end E: of a b c d e f with noise at c d and f the encoder reads a b X e Y E, the
decoder writes X c d Y f E.

All is a function of the seed and a sample's key alone: for each place where a span could end a number is drawn by
SplitMix64 (`order.mix`), and the M − 1 smallest say where spans end.

Shapes: b samples, n tokens each, S that the encoder reads, T that the decoder writes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zerokara.config.sample_lengths import SampleLengths
from zerokara.samples.order import GOLDEN, mix, mix_many

Ids = NDArray[np.int64]


def corrupt(tokens: Ids, noise: NDArray[np.bool_], sentinels: Ids, end_id: int) -> tuple[Ids, Ids]:
    """What the encoder reads [b, S] and the decoder writes [b, T] of `tokens` [b, n], `noise` as `noise_mask` gives it.

    `sentinels` are the ids of <extra_id_0>, <extra_id_1>, …, at least as many as there are spans.
    """
    return _with_gaps(tokens, noise, sentinels, end_id), _with_gaps(tokens, ~noise, sentinels, end_id)


def noise_mask(lengths: SampleLengths, seed: int, keys: Ids) -> NDArray[np.bool_]:
    """True where a token is noise, [b, n], for samples of these keys."""
    kept = _span_lengths(lengths.raw - lengths.num_noise_tokens, lengths.num_spans, seed, keys, stream=0)
    noise = _span_lengths(lengths.num_noise_tokens, lengths.num_spans, seed, keys, stream=1)
    in_turn = np.stack([kept, noise], axis=2).reshape(len(keys), 2 * lengths.num_spans)
    changes = np.zeros((len(keys), lengths.raw), dtype=np.int64)
    begins = np.cumsum(in_turn, axis=1)[:, :-1]
    np.put_along_axis(changes, begins, 1, axis=1)
    return np.cumsum(changes, axis=1) % 2 == 1


def merged(read: Ids, written: Ids, sentinels: Ids, end_id: int) -> Ids:
    """The text of one sample again, from what the encoder reads and the decoder writes of it; one dimension each."""
    place_of = {int(sentinel): place for place, sentinel in enumerate(sentinels)}
    spans: dict[int, list[int]] = {}
    current: list[int] = []
    for token in written[:-1].tolist():
        if token in place_of:
            current = spans.setdefault(place_of[token], [])
        else:
            current.append(token)
    assert read[-1] == written[-1] == end_id, "both end"
    text: list[int] = []
    for token in read[:-1].tolist():
        text.extend(spans[place_of[token]] if token in place_of else [token])
    return np.array(text, dtype=np.int64)


def _with_gaps(tokens: Ids, gone: NDArray[np.bool_], sentinels: Ids, end_id: int) -> Ids:
    """The tokens that are not gone, a sentinel in the place of each stretch that is, and the end."""
    first = gone.copy()
    first[:, 1:] &= ~gone[:, :-1]
    number = np.cumsum(first, axis=1) - 1
    shown = np.where(first, sentinels[np.maximum(number, 0)], tokens)
    rest = shown[~gone | first].reshape(len(tokens), -1)  # as many in each sample
    return np.concatenate([rest, np.full((len(tokens), 1), end_id, dtype=np.int64)], axis=1)


def _span_lengths(num_tokens: int, num_spans: int, seed: int, keys: Ids, stream: int) -> Ids:
    """Lengths, at least 1 each, of `num_spans` that make up `num_tokens`, [b, M]; every way to cut is as likely."""
    if num_spans == 1:
        return np.full((len(keys), 1), num_tokens, dtype=np.int64)
    drawn = _draws(seed, keys, stream, num_tokens - 1)
    cuts = np.sort(np.argpartition(drawn, num_spans - 2, axis=1)[:, : num_spans - 1], axis=1) + 1
    edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, num_tokens)))
    return np.diff(edges, axis=1).astype(np.int64)


def _draws(seed: int, keys: Ids, stream: int, number: int) -> NDArray[np.uint64]:
    """Numbers of 64 bits that belong to a seed, a key and a stream, [b, number]."""
    of_seed = np.uint64(mix(mix(seed + GOLDEN) + stream))
    of_key = mix_many(keys.astype(np.uint64) ^ of_seed)
    steps = np.arange(1, number + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return mix_many(of_key[:, None] + steps)
