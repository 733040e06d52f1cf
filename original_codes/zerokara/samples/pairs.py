"""The objective of fine-tuning: learn the answers of packed examples, each by itself.

Attention stays within an example and positions restart, so a packed example is computed as it would be alone. Padding
is a segment of its own behind the examples; nothing is learned there. A batch tells the number of examples in each row,
and so which positions are padding: a mixture of experts balances the others.

Shapes: b rows, S input positions (of the encoder, where there is one), T predicted positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerokara.config.data import SampleLengths
from zerokara.samples.objective import Batch, Prompt, document_offsets, first_in_segment
from zerokara.samples.packed_examples import Ids, PackedRows
from zerokara.tokenizer.encoder import Encoder


@dataclass(frozen=True)
class Pairs:
    """Answers from what is read before them."""

    lengths: SampleLengths
    """Lengths of a packed row."""
    start_id: int | None = None
    """First input of a decoder with an encoder before it; None for a decoder by itself."""

    @classmethod
    def of_run(cls, lengths: SampleLengths, encoder: Encoder, is_encoder_decoder: bool) -> Pairs:
        """The objective of a run."""
        return cls(lengths, encoder.pad_id if is_encoder_decoder else None)

    @property
    def sentinel_ids(self) -> list[int]:
        """Control tokens that are predicted all the same: none."""
        return []

    def __call__(self, rows: PackedRows, keys: Ids, real: NDArray[np.bool_] | None = None) -> Batch:
        """Make the batch of some rows, whatever the keys; `real`, like `rows.labels`, is False where none counts."""
        learned = rows.learned if real is None else rows.learned & real
        mask = learned.astype(np.float32)
        if rows.decoder_segments is None:
            offsets = document_offsets(rows.segments)
            return Batch(rows.inputs, rows.labels, mask, rows.segments, offsets, num_examples=rows.num_examples)
        assert self.start_id is not None
        return Batch(
            rows.inputs,
            rows.labels,
            mask,
            rows.segments,
            decoder_inputs=_shifted(rows.labels, rows.decoder_segments, self.start_id),
            decoder_segments=rows.decoder_segments,
            num_examples=rows.num_examples,
        )

    def target_counts(self, token_counts: Ids) -> NDArray[np.float64]:
        """Relative frequency of each id among the targets, of counts of the learned tokens."""
        return token_counts.astype(np.float64)

    def prompt(self, encoder: Encoder, text: str, max_new_tokens: int) -> Prompt:
        """The ids of what is read; the beginning of a text that is too long is cut off."""
        if self.start_id is not None:
            read = encoder.encode(text).tolist()[-(self.lengths.input - 1) :]
            return Prompt([*read, encoder.eos_id], [self.start_id])
        return Prompt([], encoder.prompt_ids(text)[-max(1, self.lengths.input - max_new_tokens) :])


def _shifted(labels: Ids, segments: Ids, start_id: int) -> Ids:
    """The decoder's inputs while it predicts `labels`: in each segment the start token, and all but the last label."""
    return np.where(first_in_segment(segments), start_id, np.roll(labels, 1, axis=1))
