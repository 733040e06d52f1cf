"""The samples of each data-parallel rank in each step: a pure function; the global batch is the same for any layout.

The position of a run is one integer, the number of samples consumed. The update at position c takes the samples at
positions c … c + G − 1 of the order, G being the global batch. They are dealt out in micro batches of m: in micro step
a, rank r of R reads the m samples from position c + (a·R + r)·m. So a run that resumes with another number of ranks or
another micro batch reads the same global batches, each sample once.

Example, G = 8, m = 2, R = 2 at position 80: rank 0 reads [80 81] then [84 85], rank 1 [82 83] then [86 87].

*Validation batches* read the tokens in their order, so that the loss and bits per byte are exact. In next-token
prediction each document is read as step 8 reads it: alone, after its start or else an end of document, in overlapping
`windows` where it is longer than the context, and each of its tokens is predicted once. Windows of several documents
are packed into one row, with intra-document masking: short ones cost little. In span corruption the tokens are cut into
whole samples, the last filled up with end tokens that do not count; the masked spans depend on the seed and the
sample's number, so that every validation masks the same tokens.

The tokens may come in parts (sources, one after another), each of which is packed or cut by itself. Every rank runs the
same number of forward passes, the surplus ones over rows that do not count: ZeRO-3 gathers the weights in each.

Example, documents [7 8 9 4 5 2] and [6 2], S = 4, start and end 2: windows 2 7 8 9 → 7 8 9 4, then 8 9 4 5 → · · 5 2,
and 2 6 → 6 2. Each of the first two fills a row, the third is padded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara.config.data import MIN_CONTEXT
from zerokara.samples import bin_packing
from zerokara.samples.objective import Batch, Ids, Objective, SpanCorruption, document_offsets
from zerokara.samples.order import MixedOrder, SampleOrder
from zerokara.samples.packed_tokens import Samples, document_bounds
from zerokara.tokens.indexed import IndexedTokens


@dataclass(frozen=True)
class BatchLayout:
    """The split of a global batch into data-parallel ranks and gradient-accumulation steps."""

    global_batch_size: int
    micro_batch_size: int
    num_ranks: int = 1

    def __post_init__(self) -> None:
        assert self.global_batch_size % (self.micro_batch_size * self.num_ranks) == 0, self

    def positions(self, consumed: int, rank: int = 0) -> NDArray[np.int64]:
        """Positions that `rank` reads in the update at `consumed`: int64 [gradient-accumulation steps, micro batch]."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} of {self.num_ranks}"
        offsets = np.arange(self.global_batch_size, dtype=np.int64).reshape(-1, self.num_ranks, self.micro_batch_size)
        return consumed + offsets[:, rank]


class Batches:
    """Micro batches of one rank, as an objective makes them of samples and the key of each."""

    def __init__(
        self,
        tokens: Samples,
        order: SampleOrder | MixedOrder,
        layout: BatchLayout,
        objective: Callable[[Any, NDArray[np.int64]], Batch],
        rank: int = 0,
    ):
        assert order.num_samples == len(tokens), f"an order of {order.num_samples} for {len(tokens)} samples"
        self.tokens, self.order, self.layout, self.rank, self._objective = tokens, order, layout, rank, objective

    def at(self, consumed: int) -> Iterator[Batch]:
        return self._of(self.layout.positions(consumed, self.rank))

    def single_samples(self, consumed: int) -> Iterator[tuple[int, Batch]]:
        """Yield the samples of `at` as batches of one, each with its position."""
        positions = self.layout.positions(consumed, self.rank).reshape(-1, 1)
        yield from zip(positions.ravel().tolist(), self._of(positions), strict=True)

    def _of(self, positions: NDArray[np.int64]) -> Iterator[Batch]:
        found = self.order.at_many(positions.ravel())  # all at once: an order costs more to set up than to ask
        epochs, indices = (each.reshape(positions.shape) for each in found)
        for row, epoch, samples in zip(positions, epochs, indices, strict=True):
            # The position is the sample's key: in another epoch the same sample has another one.
            yield replace(self._objective(self.tokens.many(samples, epoch), row), sequence_numbers=row)


@dataclass(frozen=True)
class Window:
    """A stretch of a document's tokens; its targets from `first_target` on are scored."""

    document: int
    begin: int
    """Index of its first input in the document's tokens (the start token has index 0)."""
    end: int
    """Index after its last target."""
    first_target: int

    @property
    def num_inputs(self) -> int:
        return self.end - self.begin - 1


def stride_of(context_length: int, min_context: float) -> int:
    """Return the tokens by which windows advance: all but the first then score after `min_context` of the context."""
    return max(1, round(context_length * (1 - min_context)))


def windows(num_tokens: int, context_length: int, stride: int, document: int = 0) -> Iterator[Window]:
    """Cut a document of `num_tokens` (start and end included) so that each but the first is a target once.

    The first window predicts all its tokens but the start; each further one moves on by a stride and predicts the
    tokens that are new in it, which then have all the others of the window before them. Example, a context of 4, a
    stride of 2, tokens 0 … 7: inputs 0 1 2 3 predict 1 2 3 4, inputs 2 3 4 5 predict 5 6, and 3 4 5 6 predict 7.
    """
    end = min(num_tokens, context_length + 1)
    if end > 1:
        yield Window(document, 0, end, 1)
    while end < num_tokens:
        first, end = end, min(num_tokens, end + stride)
        yield Window(document, end - 1 - context_length, end, first)


class ValidationBatches:
    """The rows of each part, each row once, in micro batches."""

    def __init__(self, num_rows: Sequence[int], batch_of: Callable[[int, Ids], Batch]):
        """`batch_of` makes the batch of rows of a part, by their numbers; one beyond its `num_rows` is padding."""
        self._num_rows, self._batch_of = num_rows, batch_of

    def batches(self, micro_batch_size: int, rank: int = 0, num_ranks: int = 1) -> Iterator[tuple[int, Batch]]:
        """Yield the micro batches of `rank`, each with the part that it counts for; as many on every rank."""
        for part, num_rows in enumerate(self._num_rows):
            for start in range(0, num_rows, micro_batch_size * num_ranks):
                yield part, self._batch_of(part, start + rank * micro_batch_size + np.arange(micro_batch_size))


def validation_batches(
    prefix: Path | str,
    objective: Objective,
    start_id: int,
    max_tokens: int | None = None,
    part_tokens: Sequence[int] = (),
) -> ValidationBatches:
    """Open a validation file (or its first `max_tokens` tokens) as the objective needs it.

    In next-token prediction each document is read after `start_id`, whether it begins with it in the file or not.
    `part_tokens` are the numbers of tokens of the parts; empty for a single part. `max_tokens` takes the first
    documents of each part, in proportion; of one that does not fit by itself, its beginning.
    """
    index = IndexedTokens(prefix)
    lengths = list(part_tokens) or [len(index.tokens)]
    assert sum(lengths) == len(index.tokens), f"parts of {sum(lengths)} tokens for {len(index.tokens)}"
    bounds = np.unique(document_bounds(index))  # without documents that have no token
    parts = []  # the beginnings of the documents of each part in the .bin, and the end of the last that is validated
    for first, end in pairwise(np.cumsum([0, *lengths]).tolist()):
        part = bounds[np.searchsorted(bounds, first) : np.searchsorted(bounds, end, side="right")]
        if max_tokens is not None and max_tokens < len(index.tokens):
            least = 1 + int(first < end and index.tokens[first] == start_id)
            share = min(end - first, max(least, max_tokens * (end - first) // len(index.tokens)))
            whole = int(np.searchsorted(part, first + share, side="right"))
            part = part[:whole] if whole > 1 else np.array([first, first + share])[: 1 + (share > 0)]
        parts.append(part)
    if isinstance(objective, SpanCorruption):
        return _of_samples([index.tokens[bounds[0] : bounds[-1]] for bounds in parts], objective)
    return _of_documents(index.tokens, parts, objective.lengths.input, start_id)


def _of_samples(parts: Sequence[NDArray[Any]], objective: SpanCorruption) -> ValidationBatches:
    """Whole samples of each part."""
    raw = objective.lengths.raw
    num_samples = [-(-len(part) // raw) for part in parts]
    first_keys = [0, *accumulate(num_samples)]

    def batch_of(number: int, samples: Ids) -> Batch:
        part, keys = parts[number], first_keys[number] + samples
        positions = samples[:, None] * raw + np.arange(raw)
        is_text = positions < len(part)
        tokens = part[np.minimum(positions, len(part) - 1)].astype(np.int64)
        counts = objective(np.where(is_text, tokens, -1), keys).labels >= 0
        batch = objective(np.where(is_text, tokens, objective.end_id), keys)
        # The sentinel of a span counts if the first token of the span does.
        counts = np.where(np.isin(batch.labels, objective.sentinel_ids), np.roll(counts, -1, axis=1), counts)
        return replace(batch, loss_mask=batch.loss_mask * counts * (samples < num_samples[number])[:, None])

    return ValidationBatches(num_samples, batch_of)


def _of_documents(tokens: NDArray[Any], parts: Sequence[Ids], seq_len: int, start_id: int) -> ValidationBatches:
    """Windows of the documents of each part, packed into rows; `parts` are the bounds of the documents in `tokens`."""
    packed = [_packed(tokens, bounds, seq_len, start_id) for bounds in parts]

    def batch_of(part: int, numbers: Ids) -> Batch:
        inputs, labels = (np.full((len(numbers), seq_len), start_id, dtype=np.int64) for _ in range(2))
        mask, segments = np.zeros(inputs.shape, dtype=np.float32), np.zeros_like(inputs)
        for place, row in enumerate(numbers.tolist()):
            at, cut = 0, packed[part][row] if row < len(packed[part]) else []
            for number, (window, first_token) in enumerate(cut):
                here = slice(at, at + window.num_inputs)
                begin = first_token + window.begin  # of the labels
                labels[place, here] = tokens[begin : begin + window.num_inputs]
                inputs[place, here] = np.roll(labels[place, here], 1)
                inputs[place, at] = tokens[begin - 1] if window.begin else start_id
                mask[place, here][window.first_target - window.begin - 1 :] = 1
                segments[place, here] = number
                at += window.num_inputs
            segments[place, at:] = len(cut)
        return Batch(inputs, labels, mask, segments, document_offsets(segments))

    return ValidationBatches([*map(len, packed)], batch_of)


def _packed(tokens: NDArray[Any], bounds: Ids, seq_len: int, start_id: int) -> list[list[tuple[Window, int]]]:
    """Pack the windows of some documents into rows; each window with the first token of its document's text."""
    stride = stride_of(seq_len, MIN_CONTEXT)
    firsts = bounds[:-1] + (tokens[bounds[:-1]] == start_id)  # the file may hold the start itself
    cut = [
        (window, first)
        for first, end in zip(firsts.tolist(), bounds[1:].tolist(), strict=True)
        for window in windows(end - first + 1, seq_len, stride)  # the start stands before its text
    ]
    rows = bin_packing.pack([window.num_inputs for window, _ in cut], seq_len)
    return [[cut[place] for place in row] for row in rows]
