"""Token files in Megatron's format: their names, content and counts.

A prefix has ``<prefix>.bin`` with the token ids and ``<prefix>.idx`` with where each document lies.
``.bin`` is the ids of all documents, one after the other, as little-endian uint16 or int32, without any header.
``.idx``, all numbers little-endian:

====== ======== ======================================================================================
offset type     meaning
====== ======== ======================================================================================
0      9 bytes  ``MMIDIDX\\0\\0``
9      uint64   version, 1
17     uint8    type of the ids: 8 is uint16, 4 is int32 (1 uint8, 2 int8, 3 int16, 5 int64 exist as well)
18     uint64   S, number of sequences
26     uint64   D + 1, number of document indices
34     int32    S times: ids in the sequence
..     int64    S times: byte offset of the sequence in .bin
..     int64    D + 1 times: the sequence at which a document starts; the last is S
====== ======== ======================================================================================

Step 2 writes each document as one sequence, so S = D; step 7 an example as a document of several
(`examples.example_files`). Example: the documents [5, 6, 2] and [7, 2] as uint16 are
``.bin`` 0500 0600 0200 0700 0200 and ``.idx`` 4d4d49444944580000 0100000000000000 08 0200000000000000
0300000000000000, lengths 03000000 02000000, offsets 0000000000000000 0600000000000000, documents
0000000000000000 0100000000000000 0200000000000000.

Source: megatron-core 0.16.1, ``megatron/core/datasets/indexed_dataset.py`` (`IndexedDatasetBuilder`, `DType`).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zerokara.base.durable import PARTIAL_SUFFIX
from zerokara.base.errors import Fault, UserError, nearest

if TYPE_CHECKING:  # pydantic, which workers need not
    from zerokara.base import manifest

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DOCUMENT_BYTES = 20
"""Bytes of one document in the index, after the header."""
TYPE_NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Type of the ids by its code."""
TOKENIZE_STEP, EXAMPLES_STEP = "step 2", "step 7"
"""The steps that write token files, as messages name them."""
UINT16_VOCAB_LIMIT = 65500
"""Vocabularies below this take two bytes an id (megatron-core's `DType.optimal_dtype`)."""


class TokenPaths:
    """Paths of step 2's files: every name that derives from `output_prefix`."""

    def __init__(self, output_prefix: str):
        self.output_prefix = output_prefix
        self.train = Path(f"{output_prefix}_text_document")
        """Prefix of the training documents' .bin and .idx; `valid` is that of the validation documents'."""
        self.valid = Path(f"{output_prefix}_valid_text_document")
        self.manifest = Path(f"{output_prefix}_text_document.manifest.json")
        """The manifest of step 2, written last."""
        self.quarantine = Path(f"{output_prefix}_quarantine.jsonl")
        """The bad lines, as JSON lines; exists only if there are any."""
        self.work_folder = Path(f"{output_prefix}_tokenizing{PARTIAL_SUFFIX}")
        """Shards while step 2 runs; on the same file system, so that the result can be renamed into place."""
        self.lock = Path(f"{output_prefix}_tokenizing.lock{PARTIAL_SUFFIX}")
        """The lock of a running step 2; beside the work folder, which comes and goes."""
        self.splits = [path_of(prefix) for prefix in (self.train, self.valid) for path_of in (bin_path, idx_path)]
        """The .bin and the .idx for training, then those for validation, which exist only if anything was held out."""

    @property
    def outputs(self) -> list[Path]:
        """The files of both splits and the quarantine that exist."""
        return [path for path in (*self.splits, self.quarantine) if path.exists()]


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The type of ids for a vocabulary, by Megatron's rule."""
    return np.dtype(np.uint16 if vocab_size < UINT16_VOCAB_LIMIT else np.int32)


def write_index(file: IO[bytes], lengths: NDArray[np.int32], dtype: np.dtype[Any], indices: NDArray[np.int64]) -> None:
    """Write the .idx of sequences of these lengths; `indices` are those of documents in the format (D + 1)."""
    file.write(header_bytes(len(lengths), len(indices), dtype))
    file.write(lengths.astype("<i4").data)
    file.write(((np.cumsum(lengths, dtype="<i8") - lengths) * dtype.itemsize).data)
    file.write(indices.astype("<i8").data)


def header_bytes(num_sequences: int, num_indices: int, dtype: np.dtype[Any]) -> bytes:
    """The first 34 bytes of an .idx; `num_indices` are those of documents, D + 1."""
    code = next(code for code, name in TYPE_NAMES.items() if name == dtype.name)
    return HEADER.pack(MAGIC, VERSION, code, num_sequences, num_indices)


def index_part(
    num_documents: int, first: int, first_id: int, lengths: NDArray[np.int32], id_bytes: int
) -> list[tuple[bytes, int]]:
    """The entries of consecutive documents, and where each lies in the .idx of `num_documents`.

    `first` is the number of the first of them, `first_id` the number of its first id.
    """
    starts = first_id + np.cumsum(lengths, dtype="<i8") - lengths
    pointers = HEADER.size + num_documents * 4
    return [
        (lengths.astype("<i4").tobytes(), HEADER.size + first * 4),
        ((starts * id_bytes).tobytes(), pointers + first * 8),
        (np.arange(first, first + len(lengths) + 1, dtype="<i8").tobytes(), pointers + (num_documents + first) * 8),
    ]


def _read_header(prefix: Path, step: str) -> tuple[np.dtype[Any], int, int]:
    """Return the type of the ids, the numbers of sequences and of documents; check that the index is as long as that.

    Raises UserError if a file is missing, or the index truncated or none of Megatron's.
    """
    index, data = idx_path(prefix), bin_path(prefix)
    for path in (index, data):
        if not path.is_file():
            make = f"create it with {step}"
            remedy = make if index.exists() or data.exists() else nearest(path, make)
            raise UserError(Fault(where=str(path), rule="does not exist", remedy=remedy))
    with open(index, "rb") as file:
        start = file.read(HEADER.size)
    if len(start) < HEADER.size or not start.startswith(MAGIC):
        raise _damaged(index, "does not start as a Megatron index does", step)
    _, version, code, num_sequences, num_indices = HEADER.unpack(start)
    if version != VERSION or code not in TYPE_NAMES or num_indices < 1:
        raise _damaged(index, f"has version {version} and type {code}; version 1 and types 1-5, 8 are known", step)
    expected = HEADER.size + num_sequences * 12 + num_indices * 8
    if index.stat().st_size != expected:
        raise _damaged(index, f"is {index.stat().st_size:,} bytes long; its header says {expected:,}", step)
    return np.dtype(TYPE_NAMES[code]).newbyteorder("<"), num_sequences, num_indices - 1


def _damaged(path: Path, rule: str, step: str) -> UserError:
    return UserError(Fault(where=str(path), rule=rule, remedy=f"create it again: {step} with --redo"))


class IndexedTokens:
    """A pair of token files, memory-mapped: nothing is read before it is asked for."""

    def __init__(self, prefix: Path | str, step: str = TOKENIZE_STEP):
        """`step` is the one that writes the files, for messages. Raises UserError for missing or damaged files."""
        self.prefix = Path(prefix)
        self.dtype, num, self.num_documents = _read_header(self.prefix, step)
        index, place = np.memmap(idx_path(self.prefix), dtype=np.uint8, mode="r"), HEADER.size
        self.lengths: NDArray[np.int32] = np.frombuffer(index, "<i4", num, place)
        """Ids in each sequence."""
        self.pointers: NDArray[np.int64] = np.frombuffer(index, "<i8", num, place + num * 4)
        """Byte offset of each sequence in the .bin."""
        self.document_indices: NDArray[np.int64] = np.frombuffer(index, "<i8", self.num_documents + 1, place + num * 12)
        """The sequence at which each document starts, and at the end the number of sequences."""
        data, end = bin_path(self.prefix), 0
        if num:
            end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if (size := data.stat().st_size) != end:
            raise _damaged(data, f"is {size:,} bytes long; {idx_path(self.prefix).name} says {end:,}", step)
        self.tokens: NDArray[Any] = np.memmap(data, self.dtype, mode="r") if size else np.empty(0, self.dtype)
        """All ids, flat."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> NDArray[Any]:
        start = int(self.pointers[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[sequence])]

    def sequences(self, document: int) -> list[NDArray[Any]]:
        """Ids of each sequence of a document; of an example each segment: read, learned, read, …"""
        first, end = self.document_indices[document : document + 2].tolist()
        return [self[number] for number in range(first, end)]


def open_splits(output_prefix: str) -> tuple[IndexedTokens, IndexedTokens | None]:
    """Open the training split, and that for validation if anything was held out; see `IndexedTokens` for errors."""
    paths = TokenPaths(output_prefix)
    has_valid = idx_path(paths.valid).exists() or bin_path(paths.valid).exists()
    return IndexedTokens(paths.train), IndexedTokens(paths.valid) if has_valid else None


def check_belongs(output_prefix: str, tokenizer_sha256: str) -> manifest.Manifest:
    """Check that the token files were made with this tokenizer; return their manifest.

    Raises UserError if they were made with another, or step 2 has not finished.
    """
    from zerokara.base import manifest

    paths = TokenPaths(output_prefix)
    record = manifest.read(paths.manifest)
    if (found := record.facts.get("tokenizer_sha256")) != tokenizer_sha256:
        rule = f"was made with another tokenizer, sha256 {found}; that of input_tokenizer_file is {tokenizer_sha256}"
        remedy = "name the tokenizer it was made with, or tokenise again: step 2 with --redo"
        raise UserError(Fault(where=str(bin_path(paths.train)), rule=rule, remedy=remedy))
    return record
