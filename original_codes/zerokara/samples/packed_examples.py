"""Token files of examples as packed rows: each row holds whole examples, one after another, and padding at its end.

An example is a document of the token files, and its segments are the sequences of the document: alternately read and
learned, the first one read.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from zerokara.config.data import SampleLengths
from zerokara.samples import bin_packing
from zerokara.samples.batches import ValidationBatches
from zerokara.samples.objective import Batch, Causal, Ids, Prompt, document_offsets, first_in_segment
from zerokara.samples.packed_tokens import DataPlan, TokenSource, document_bounds
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.indexed import EXAMPLES_STEP, IndexedTokens


class PackedExamples:
    """The rows of one pair of token files; the ids are memory-mapped, the packing is in memory.

    `max_tokens` takes the first examples, up to that number of tokens, but at least one. Raises UserError if the files
    are missing or damaged.
    """

    def __init__(
        self,
        prefix: Path | str,
        lengths: SampleLengths,
        is_encoder_decoder: bool,
        pad_id: int,
        seed: int = 0,
        max_tokens: int | None = None,
    ):
        self.prefix, self.lengths = Path(prefix), lengths
        self.is_encoder_decoder, self.pad_id, self.seed = is_encoder_decoder, pad_id, seed
        self._index = IndexedTokens(self.prefix, EXAMPLES_STEP)
        bounds = document_bounds(self._index)
        self.num_examples = len(bounds) - 1
        if max_tokens is not None and self.num_examples:
            self.num_examples = max(1, int(np.searchsorted(bounds[1:], max_tokens, side="right")))
        self.num_tokens = int(bounds[self.num_examples])
        """Tokens of the examples."""
        if is_encoder_decoder:
            read, target = (each[: self.num_examples] for each in pair_lengths(self._index))
            self._packing = bin_packing.pack(read, lengths.input, target, lengths.target, seed)
        else:
            self._packing = bin_packing.pack(np.diff(bounds)[: self.num_examples] - 1, lengths.input, seed=seed)

    def __len__(self) -> int:
        return len(self._packing)

    def examples(self, row: int) -> list[int]:
        """Return the numbers of the examples in a row, in their order."""
        return self._packing[row].tolist()

    def documents(self, index: int, epoch: int, sources: Sequence[TokenSource]) -> list[tuple[int, int]]:
        """Return the examples in the row at `index`, all of the one source."""
        return [(0, example) for example in self.examples(index)]

    @property
    def padding_share(self) -> float:
        """Share of the computed positions that are padding, the encoder's and the decoder's together."""
        computed = len(self) * (self.lengths.input + (self.lengths.target if self.is_encoder_decoder else 0))
        num_positions = self.num_tokens - (0 if self.is_encoder_decoder else self.num_examples)
        return 1 - num_positions / computed if computed else 0.0

    def many(self, indices: Sequence[int] | Ids, epochs: object = None) -> Batch:
        """Return the batch of the rows at `indices`, the same in all epochs; one behind the last is padding."""
        inputs = np.full((len(indices), self.lengths.input), self.pad_id, dtype=np.int64)
        labels = np.full((len(indices), self.lengths.target), self.pad_id, dtype=np.int64)
        segments, target_segments = np.zeros_like(inputs), np.zeros_like(labels)
        loss_mask, num_examples = np.zeros(labels.shape, np.float32), np.zeros(len(indices), dtype=np.int64)
        for place, row in enumerate(indices):
            examples = self.examples(int(row)) if row < len(self) else []
            at = target_at = 0
            for number, example in enumerate(examples):
                of_example = slice(*self._index.document_indices[example : example + 2].tolist())
                lengths = self._index.lengths[of_example]
                start = int(self._index.pointers[of_example.start]) // self._index.dtype.itemsize
                ids = self._index.tokens[start : start + int(lengths.sum())]
                is_learned = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
                end, first = len(ids) - 1, 1  # a decoder reads all but the last, and predicts all but the first
                if self.is_encoder_decoder:
                    end = first = len(ids) - int(is_learned.sum())
                read, target = slice(at, at + len(ids[:end])), slice(target_at, target_at + len(ids[first:]))
                inputs[place, read], segments[place, read] = ids[:end], number
                labels[place, target], target_segments[place, target] = ids[first:], number
                loss_mask[place, target] = is_learned[first:]
                at, target_at = read.stop, target.stop
            segments[place, at:] = target_segments[place, target_at:] = num_examples[place] = len(examples)
        if not self.is_encoder_decoder:
            return Batch(inputs, labels, loss_mask, segments, document_offsets(segments), num_examples=num_examples)
        # In each segment of the target the start token, which is padding's, and all labels but the last.
        decoder_inputs = np.where(first_in_segment(target_segments), self.pad_id, np.roll(labels, 1, axis=1))
        return Batch(inputs, labels, loss_mask, segments, None, decoder_inputs, target_segments, num_examples)


def pair_lengths(index: IndexedTokens) -> tuple[Ids, Ids]:
    """Return the lengths of encoder input and decoder target of each example of an encoder-decoder."""
    assert (np.diff(index.document_indices) == 2).all(), f"{index.prefix} holds examples of other than two segments"
    return index.lengths[0::2].astype(np.int64), index.lengths[1::2].astype(np.int64)


@dataclass(frozen=True)
class Pairs:
    """The objective of fine-tuning: learn the answers of packed examples.

    Attention stays within an example and positions restart, so a packed example is computed as it would be alone.
    `Batch.num_examples` tells which positions are padding: a mixture of experts balances the others.
    """

    lengths: SampleLengths
    start_id: int | None = None
    """First input of a decoder with an encoder before it; None for a decoder by itself."""
    sentinel_ids: ClassVar[list[int]] = []

    def __call__(self, rows: Batch, keys: Ids) -> Batch:
        """Return the batch of `PackedExamples.many`, whatever the keys."""
        return rows

    def prompt(self, encoder: Encoder, text: str, max_new_tokens: int) -> Prompt:
        """Encode the text that is read; the beginning of one that is too long is cut off."""
        if self.start_id is None:
            return Causal(self.lengths).prompt(encoder, text, max_new_tokens)
        read = encoder.encode(text).tolist()[-(self.lengths.input - 1) :]
        return Prompt([*read, encoder.eos_id], [self.start_id])


@dataclass(frozen=True)
class ExampleData(DataPlan):
    """Training data of a fine-tuning.

    A sample is a packed row of examples, and the rows are shuffled anew in each epoch. Tokens are counted as everywhere
    in a run, by positions of a sample, so the padding at the ends of rows is counted in.
    """

    packed: PackedExamples

    @classmethod
    def of_rows(cls, packed: PackedExamples, num_valid_tokens: int = 0, name: str = "examples") -> ExampleData:
        """Return the data of these rows; `name` is that of their one source, for display."""
        source = TokenSource(name, 0, len(packed) * packed.lengths.raw, num_valid_tokens)
        return cls(packed.prefix, (source,), packed.lengths, packed.seed, "shuffle", (), (), packed)

    def tokens(self) -> PackedExamples:
        return self.packed

    def validation_batches(self, prefix: Path, max_tokens: int | None) -> ValidationBatches:
        """Open the examples at `prefix`, in rows that are longer than in training where an example is."""
        index, lengths = IndexedTokens(prefix, EXAMPLES_STEP), self.lengths
        is_encoder_decoder, pad_id = self.packed.is_encoder_decoder, self.packed.pad_id
        if index.num_documents:
            sizes = pair_lengths(index) if is_encoder_decoder else (np.diff(document_bounds(index)) - 1,)
            longest = [bin_packing.rounded_up(int(each.max())) for each in sizes]
            lengths = replace(lengths, input=max(lengths.input, longest[0]), target=max(lengths.target, longest[-1]))
        packed = PackedExamples(prefix, lengths, is_encoder_decoder, pad_id, self.seed, max_tokens)
        return ValidationBatches([len(packed)], lambda _, rows: packed.many(rows))

    def identity(self) -> dict[str, Any]:
        """Return what must stay the same for a run to resume: it and the examples determine the packing."""
        lengths = {"packed_length": self.lengths.input, "packed_target_length": self.lengths.target}
        return {**lengths, "packing": bin_packing.VERSION}
