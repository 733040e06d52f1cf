"""Token files of examples, made in the test: documents of segments that are alternately read and learned."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zerokara.examples.example_files import example_writer

Example = Sequence[Sequence[int]]
"""The segments of an example: read, learned, read, learned, …"""


def write_examples(prefix: Path, examples: Sequence[Example]) -> Path:
    """Write examples, each a document, its segments the sequences of it; return the prefix."""
    with example_writer(prefix, np.dtype(np.uint16)) as write:
        for example in examples:
            write([np.array(ids, np.int32) for ids in example])
    return prefix


def conversation(chance: np.random.Generator, vocabulary: int, end_id: int, turns: int = 1) -> list[list[int]]:
    """An example of a decoder with random ids above `end_id`: each learned segment ends with the end token."""
    segments = []
    for _ in range(turns):
        segments.append(chance.integers(end_id + 1, vocabulary, chance.integers(1, 9)).tolist())
        segments.append([*chance.integers(end_id + 1, vocabulary, chance.integers(0, 9)).tolist(), end_id])
    return segments


def pair(chance: np.random.Generator, vocabulary: int, end_id: int) -> list[list[int]]:
    """An example of an encoder-decoder: both segments end with the end token."""
    return [
        [*chance.integers(end_id + 1, vocabulary, chance.integers(0, 12)).tolist(), end_id],
        [*chance.integers(end_id + 1, vocabulary, chance.integers(0, 9)).tolist(), end_id],
    ]
