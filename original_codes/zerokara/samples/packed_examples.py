"""Token files of examples as packed rows: each row holds whole examples, one after another, and padding at its end.

An example is a document of the token files, and its segments are the sequences of the document: alternately read and
learned, the first one read. So what is learned, and where an answer ends, is known by construction.

For a decoder an example of n tokens takes n − 1 positions: the inputs are its first n − 1 tokens, the labels its last
n − 1, and a label is learned if it stands in a learned segment. For an encoder-decoder an example is two segments, the
encoder input and the decoder target, both with their end token.

Each position has a *segment* for intra-document masking: the number of its example in the row, from 0; padding is a
segment of its own, after the last. Example, a decoder's row of 8, examples [7 8 | 5 2] and [9 | 6 2] with the learned
segments behind the bars: inputs 7 8 5 9 6 · · ·, labels 8 5 2 6 2 · · ·, learned 0 1 1 1 1 0 0 0, segments
0 0 0 1 1 2 2 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara.config.data import SampleLengths
from zerokara.samples import packing
from zerokara.tokens.indexed import EXAMPLES_STEP, IndexedTokens

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]

_CHUNK = 1 << 16
"""Segments whose tokens are counted at a time."""


@dataclass(frozen=True)
class PackedRows:
    """Some rows. Shapes: b rows, S input positions (of the encoder, where there is one), T predicted positions."""

    inputs: Ids
    """Input ids of the model, or of its encoder, [b, S]."""
    segments: Ids
    """Segment of each input position, ascending, [b, S]."""
    labels: Ids
    """The id that follows each position, or the decoder target, [b, T]."""
    learned: Mask
    """Whether the label is learned, [b, T]."""
    num_examples: Ids
    """Number of examples in each row, and so of the segment that is padding, [b]."""
    decoder_segments: Ids | None = None
    """Of an encoder-decoder: segment of each position of the target, [b, T]."""


class PackedExamples:
    """The rows of one pair of token files; the ids are memory-mapped, the packing is in memory."""

    def __init__(
        self,
        prefix: Path | str,
        lengths: SampleLengths,
        is_encoder_decoder: bool,
        pad_id: int,
        seed: int = 0,
        max_tokens: int | None = None,
    ):
        """`max_tokens` takes the first examples, up to so many tokens in all, but at least one.

        Raises:
            UserError: the files are missing or damaged.
        """
        self.prefix, self.lengths = Path(prefix), lengths
        self._is_encoder_decoder, self._pad_id = is_encoder_decoder, pad_id
        self._index = IndexedTokens(self.prefix, EXAMPLES_STEP)
        ends = self._token_offsets()[1:]
        self.num_examples = len(ends)
        if max_tokens is not None and self.num_examples:
            self.num_examples = max(1, int(np.searchsorted(ends, max_tokens, side="right")))
        self._packing = self._packed(seed)

    def __len__(self) -> int:
        return len(self._packing)

    def examples(self, row: int) -> list[int]:
        """Numbers of the examples in a row, as they lie there."""
        return [int(example) for example in self._packing[row]]

    @property
    def num_tokens(self) -> int:
        """Tokens of the examples."""
        return int(self._token_offsets()[self.num_examples])

    @property
    def padding_share(self) -> float:
        """Share of the computed positions that are padding, the encoder's and the decoder's together."""
        computed = len(self) * (self.lengths.input + (self.lengths.target if self._is_encoder_decoder else 0))
        return 1 - self.num_positions / computed if computed else 0.0

    @property
    def num_positions(self) -> int:
        """Positions that the examples take."""
        return self.num_tokens - (0 if self._is_encoder_decoder else self.num_examples)

    @property
    def num_learned_tokens(self) -> int:
        """Labels that are learned, in one epoch."""
        is_learned = _is_learned(self._index.document_indices[: self.num_examples + 1])
        learned = int(self._index.lengths[: len(is_learned)][is_learned].sum())
        return learned - len(self._learned_and_no_label())

    @property
    def learned_share(self) -> float:
        """Share of the examples' tokens that are learned."""
        return self.num_learned_tokens / max(1, self.num_tokens)

    def learned_counts(self, num_ids: int) -> Ids:
        """How often each id is learned in one epoch, [num_ids]."""
        is_learned = _is_learned(self._index.document_indices[: self.num_examples + 1])
        counts = -np.bincount(self._index.tokens[self._learned_and_no_label()], minlength=num_ids)
        at = 0
        for start in range(0, len(is_learned), _CHUNK):
            part = slice(start, min(start + _CHUNK, len(is_learned)))
            chosen = np.repeat(is_learned[part], self._index.lengths[part])
            counts += np.bincount(self._index.tokens[at : at + len(chosen)][chosen], minlength=num_ids)
            at += len(chosen)
        return counts

    def many(self, indices: Sequence[int] | Ids, real: Mask | None = None) -> PackedRows:
        """The rows at `indices`; where `real` (one for each) is False, a row of padding."""
        num, lengths = len(indices), self.lengths
        inputs, segments = self._blank(num, lengths.input)
        labels, decoder_segments = self._blank(num, lengths.target)
        learned, num_examples = np.zeros(labels.shape, dtype=np.bool_), np.zeros(num, dtype=np.int64)
        for place, row in enumerate(indices):
            if real is None or real[place]:
                arrays = (inputs[place], segments[place], labels[place], learned[place], decoder_segments[place])
                num_examples[place] = len(self._packing[int(row)])
                self._fill(self._packing[int(row)], *arrays)
        of_decoder = decoder_segments if self._is_encoder_decoder else None
        return PackedRows(inputs, segments, labels, learned, num_examples, of_decoder)

    def _fill(
        self, examples: Ids, inputs: Ids, segments: Ids, labels: Ids, learned: Mask, target_segments: Ids
    ) -> None:
        """Write the examples of one row into its arrays, whose lengths are S and T."""
        at, target_at = 0, 0
        for number, example in enumerate(examples.tolist()):
            ids, is_learned = self._example(example)
            if self._is_encoder_decoder:
                split = len(ids) - int(is_learned.sum())
                read, target, target_learned = ids[:split], ids[split:], is_learned[split:]
            else:
                read, target, target_learned = ids[:-1], ids[1:], is_learned[1:]
            end, target_end = at + len(read), target_at + len(target)
            inputs[at:end], segments[at:end] = read, number
            labels[target_at:target_end], learned[target_at:target_end] = target, target_learned
            target_segments[target_at:target_end] = number
            at, target_at = end, target_end
        segments[at:] = target_segments[target_at:] = len(examples)

    def _example(self, example: int) -> tuple[NDArray[Any], Mask]:
        """The ids of an example, and whether each stands in a learned segment."""
        first, end = self._index.document_indices[example : example + 2].tolist()
        lengths = self._index.lengths[first:end]
        start = int(self._index.pointers[first]) // self._index.dtype.itemsize
        ids = self._index.tokens[start : start + int(lengths.sum())]
        return ids, np.repeat(np.arange(end - first) % 2 == 1, lengths)

    def _blank(self, num: int, length: int) -> tuple[Ids, Ids]:
        return np.full((num, length), self._pad_id, dtype=np.int64), np.zeros((num, length), dtype=np.int64)

    def _token_offsets(self) -> Ids:
        """Where each example begins in the .bin, and the end of the last, in tokens."""
        by_sequence = np.concatenate([[0], np.cumsum(self._index.lengths, dtype=np.int64)])
        return by_sequence[self._index.document_indices]

    def _packed(self, seed: int) -> packing.Packing:
        if not self._is_encoder_decoder:
            tokens = np.diff(self._token_offsets())[: self.num_examples]
            return packing.pack(tokens - 1, self.lengths.input, seed)
        read, target = pair_lengths(self._index)
        kept = slice(self.num_examples)
        return packing.pack_pairs(read[kept], target[kept], self.lengths.input, self.lengths.target, seed)

    def _learned_and_no_label(self) -> Ids:
        """Places in the .bin of a decoder's first tokens, which nothing predicts, where nothing is read before them."""
        firsts = self._index.document_indices[: self.num_examples]
        if self._is_encoder_decoder:
            firsts = firsts[:0]
        return self._token_offsets()[: len(firsts)][self._index.lengths[firsts] == 0]


def pair_lengths(index: IndexedTokens) -> tuple[Ids, Ids]:
    """Tokens of the encoder input and of the decoder target of each example of an encoder-decoder."""
    assert (np.diff(index.document_indices) == 2).all(), f"{index.prefix} holds examples of other than two segments"
    return index.lengths[0::2].astype(np.int64), index.lengths[1::2].astype(np.int64)


def _is_learned(document_indices: Ids) -> Mask:
    """Of each sequence of these documents, whether it is a learned segment."""
    counts = np.diff(document_indices)
    is_learned: Mask = (np.arange(int(counts.sum())) - np.repeat(document_indices[:-1], counts)) % 2 == 1
    return is_learned
