"""Token files of examples: Megatron's own format, in which an example is a document and its segments are sequences.

The sequences of a document are read and learned in turn; the first is read, and may hold nothing. So where reading ends
and learning begins stands in the index, exactly, and nothing is searched for. The format is that of `tokens.indexed`.

Example: the examples [5, 6] read, [7, 2] learned; and [8] read, [9, 2] learned, [5] read, [2] learned, have the
sequence lengths 2 2 1 2 1 1 and the document indices 0 2 6.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara.durable import atomic_file
from zerokara.errors import Fault, UserError
from zerokara.tokenizer.encoder import Ids
from zerokara.tokens.indexed import EXAMPLES_STEP, IndexedTokens, write_index
from zerokara.tokens.layout import bin_path, idx_path

Write = Callable[[Sequence[Sequence[Ids]]], None]
"""Writes examples behind those before, each as its segments: read, learned, read, …"""


@contextmanager
def example_writer(prefix: Path, dtype: np.dtype[Any]) -> Iterator[Write]:
    """Yield the writer of a pair of token files, which appear when the block ends without an error."""
    lengths, ends = array("i"), array("q", [0])

    with atomic_file(bin_path(prefix)) as file:

        def write(examples: Sequence[Sequence[Ids]]) -> None:
            segments = [segment for example in examples for segment in example]
            lengths.extend(map(len, segments))
            for example in examples:
                ends.append(ends[-1] + len(example))
            file.write(np.concatenate([np.empty(0, dtype), *segments]).astype(dtype).data)

        yield write
    with atomic_file(idx_path(prefix)) as file:
        write_index(file, np.array(lengths, dtype=np.int32), dtype, np.array(ends, dtype=np.int64))


class ExampleTokens:
    """Examples in a pair of token files, memory-mapped. Picklable (opens again).

    Raises:
        UserError: a file is missing, truncated or no token file, or an example in it has no learned segment.
    """

    def __init__(self, prefix: Path | str):
        self.prefix = Path(prefix)
        self.tokens = IndexedTokens(prefix, EXAMPLES_STEP)
        """All segments, in order."""
        self.first_segments: NDArray[np.int64] = self.tokens.document_indices
        """int64[N + 1]: the number of the first segment of each example, and at the end the number of segments."""
        if len(self) and int(np.diff(self.first_segments).min()) < 2:
            rule = "are no token files of examples: a document has less than two segments"
            raise UserError(Fault(str(prefix), rule, remedy="run step 7 with --redo"))

    def __len__(self) -> int:
        return self.tokens.num_documents

    def segments(self, example: int) -> list[NDArray[Any]]:
        """The ids of each segment of an example: read, learned, read, …"""
        first, end = self.first_segments[example], self.first_segments[example + 1]
        return [self.tokens[number] for number in range(int(first), int(end))]

    def prompt(self, example: int) -> list[int]:
        """The ids after which the last answer is asked for: all before the last learned segment."""
        segments = self.segments(example)
        last = len(segments) - 1 - len(segments) % 2
        return [int(token) for segment in segments[:last] for token in segment]

    @cached_property
    def learned_lengths(self) -> NDArray[np.int64]:
        """int64[N]: learned tokens of each example."""
        starts = np.repeat(self.first_segments[:-1], np.diff(self.first_segments))
        is_learned = (np.arange(len(starts)) - starts) % 2 == 1
        return self._sums(np.where(is_learned, self.tokens.lengths, 0))

    @cached_property
    def read_lengths(self) -> NDArray[np.int64]:
        """int64[N]: read tokens of each example."""
        return self._sums(self.tokens.lengths) - self.learned_lengths

    def _sums(self, of_segments: NDArray[Any]) -> NDArray[np.int64]:
        """Sums over the segments of each example."""
        sums = np.concatenate([[0], np.cumsum(of_segments, dtype=np.int64)])
        return sums[self.first_segments[1:]] - sums[self.first_segments[:-1]]

    def __reduce__(self) -> tuple[type[ExampleTokens], tuple[Path]]:
        return ExampleTokens, (self.prefix,)
