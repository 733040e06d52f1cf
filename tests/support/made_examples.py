"""Token files of examples, made in the test: documents of segments that are alternately read and learned."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

Example = Sequence[Sequence[int]]
"""The segments of an example: read, learned, read, learned, …"""


def write_examples(prefix: Path, examples: Sequence[Example]) -> Path:
    """Write examples as Megatron's files, each a document, its segments the sequences of it; return the prefix."""
    segments = [segment for example in examples for segment in example]
    ids = np.array([one for segment in segments for one in segment], dtype="<u2")
    lengths = np.array([len(segment) for segment in segments], dtype="<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8") * 2 if segments else np.zeros(0, "<i8")
    documents = np.cumsum([0, *map(len, examples)]).astype("<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(segments), len(examples) + 1)
    prefix.with_name(prefix.name + ".bin").write_bytes(ids.tobytes())
    index = header + lengths.tobytes() + pointers.tobytes() + documents.tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
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
