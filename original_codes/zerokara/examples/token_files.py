"""Token files of examples: Megatron's own format, in which an example is a document and its segments are sequences.

The sequences of a document are read and learned in turn; the first is read, and may hold nothing. So where reading ends
and learning begins stands in the index, exactly, and nothing is searched for. The format is that of `tokens.indexed`.

Example: the examples [5, 6] read, [7, 2] learned; and [8] read, [9, 2] learned, [5] read, [2] learned, have the
sequence lengths 2 2 1 2 1 1 and the document indices 0 2 6.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from zerokara.durable import atomic_file
from zerokara.errors import Fault, UserError
from zerokara.tokenizer.encoder import Ids
from zerokara.tokens.indexed import EXAMPLES_STEP, IndexedTokens, write_index
from zerokara.tokens.layout import bin_path, idx_path


class ExampleWriter:
    """Writes examples one after another; made by `example_writer`."""

    def __init__(self, file: IO[bytes], dtype: np.dtype[Any]):
        self._file, self._dtype = file, dtype
        self._lengths = array("i")
        self._ends = array("q", [0])

    def add(self, examples: Sequence[Sequence[Ids]]) -> None:
        """Write examples, each as its segments: read, learned, read, …"""
        segments = [segment for example in examples for segment in example]
        if not segments:
            return
        self._lengths.extend(map(len, segments))
        end = self._ends[-1]
        for example in examples:
            end += len(example)
            self._ends.append(end)
        self._file.write(np.concatenate(segments).astype(self._dtype).data)

    def write_index(self, file: IO[bytes]) -> None:
        """Write the .idx of what was added."""
        lengths = np.array(self._lengths, dtype=np.int32)
        write_index(file, lengths, self._dtype, np.array(self._ends, dtype=np.int64))


@contextmanager
def example_writer(prefix: Path, dtype: np.dtype[Any]) -> Iterator[ExampleWriter]:
    """Yield a writer of a pair of token files, which appear when the block ends without an error."""
    with atomic_file(bin_path(prefix)) as file:
        writer = ExampleWriter(file, dtype)
        yield writer
    with atomic_file(idx_path(prefix)) as file:
        writer.write_index(file)


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
        if len(self) and int(self.num_segments.min()) < 2:
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

    @property
    def num_segments(self) -> NDArray[np.int64]:
        """int64[N]: segments of each example."""
        return np.diff(self.first_segments)

    @cached_property
    def is_learned(self) -> NDArray[np.bool_]:
        """bool[S]: whether each segment is learned."""
        starts = np.repeat(self.first_segments[:-1], self.num_segments)
        return (np.arange(len(starts)) - starts) % 2 == 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """int64[N]: tokens of each example."""
        return self._sums(self.tokens.lengths)

    @cached_property
    def learned_lengths(self) -> NDArray[np.int64]:
        """int64[N]: learned tokens of each example."""
        return self._sums(np.where(self.is_learned, self.tokens.lengths, 0))

    @cached_property
    def read_lengths(self) -> NDArray[np.int64]:
        """int64[N]: read tokens of each example."""
        return self.lengths - self.learned_lengths

    def _sums(self, of_segments: NDArray[Any]) -> NDArray[np.int64]:
        """Sums over the segments of each example."""
        sums = np.concatenate([[0], np.cumsum(of_segments, dtype=np.int64)])
        return sums[self.first_segments[1:]] - sums[self.first_segments[:-1]]

    def __reduce__(self) -> tuple[type[ExampleTokens], tuple[Path]]:
        return ExampleTokens, (self.prefix,)
