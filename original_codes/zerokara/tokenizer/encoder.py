"""Text to token ids and back, as SentencePiece defines them, one line at a time.

In: text. Out: int32 arrays of ids, without an end-of-document id.

The ids of a document are the ids of its lines, each encoded by itself, joined by the id of the piece "\\n".
Lines, because SentencePiece's unigram search adds scores in float32: on a document of some thousand tokens the
rounding picks now and then another segmentation than on the line alone, and then no second implementation
(Hugging Face's, in float64) could agree with it. A line ends at "\\n" and nowhere else: "\\r", U+2028 and form
feeds are characters like any other. Control pieces are of type CONTROL, which SentencePiece never matches in text:
a text that spells "</s>" is text.

Source: sentencepiece 0.2.3, `SentencePieceProcessor`. Measured there: a list call builds a thread pool, which pays over
some hundred documents and makes one short document five times slower; the Python layer round a call takes longer than
the encoding of a short line, so where the version is the known one its inner methods are called.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from zerokara.errors import Fault, UserError

Ids = npt.NDArray[np.int32]

NEWLINE = "\n"
SPACE_MARK = "\u2581"
"""The character that stands for a space inside pieces: SentencePiece reads it, in text too, as a space."""


class Encoder:
    """The tokenizer that training uses: opened from a `.model` file, cheap to open and to pickle.

    Raises: UserError when the file is no SentencePiece model or lacks what training needs (a piece for the line
    end, an end-of-document id, a padding id that is another).
    """

    def __init__(self, model_path: str | Path) -> None:
        self.model_path = Path(model_path)
        self._model = _read_model(self.model_path)
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(self._model)
        except RuntimeError as error:
            raise UserError(
                Fault(str(self.model_path), f"is not a SentencePiece model ({error})", remedy="make one with step 1")
            ) from error
        self.vocab_size: int = self._processor.GetPieceSize()
        self.unk_id: int = self._processor.unk_id()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.pad_id: int = self._processor.pad_id()
        self.newline_id: int = self._processor.PieceToId(NEWLINE)
        self._check()
        self._newline = np.int32(self.newline_id).tobytes()
        self._line_ids, self._batch_ids = _buffer_methods(self._processor)
        self._prefixes_lines = self._processor.EncodeAsIds("a") != self._processor.EncodeAsIds("\na")[1:]

    def _check(self) -> None:
        where, remedy = str(self.model_path), "train the tokenizer with step 1, which sees to it"
        faults = []
        if self.eos_id < 0:
            faults.append(Fault(where, "has no </s> piece, which ends each document", remedy=remedy))
        if self.pad_id < 0 or self.pad_id == self.eos_id:
            faults.append(Fault(where, "has no <pad> piece of its own", remedy=remedy))
        if self._processor.EncodeAsIds(f"a{NEWLINE}")[-1:] != [self.newline_id] or self.newline_id == self.unk_id:
            faults.append(Fault(where, 'has no piece "\\n" for the line end', remedy=remedy))
        if faults:
            raise UserError(faults)

    def encode(self, text: str) -> Ids:
        """The ids of one document, without the end-of-document id."""
        line_ids = self._line_ids
        return np.frombuffer(self._newline.join([line_ids(line) for line in text.split(NEWLINE)]), dtype=np.int32)

    def encode_many(self, texts: Iterable[str]) -> list[Ids]:
        """The ids of each document, the same as `encode` gives; hand it some hundred documents at a time."""
        line_lists = [text.split(NEWLINE) for text in texts]
        lines = [line for line_list in line_lists for line in line_list]
        ids = self._batch_ids(lines)
        documents, start = [], 0
        for line_list in line_lists:
            end = start + len(line_list)
            documents.append(np.frombuffer(self._newline.join(ids[start:end]), dtype=np.int32))
            start = end
        return documents

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of a document; control ids stand for no text, byte pieces that are no UTF-8 for U+FFFD."""
        listed = [int(i) for i in ids]
        if not self._prefixes_lines:
            return str(self._processor.DecodeIds(listed))
        # SentencePiece takes the dummy prefix off the start of what it decodes: each line has one.
        lines: list[list[int]] = [[]]
        for i in listed:
            if i == self.newline_id:
                lines.append([])
            else:
                lines[-1].append(i)
        return NEWLINE.join(self._processor.DecodeIds(line) for line in lines)

    def piece(self, token_id: int) -> str:
        """The piece as it stands in the vocabulary, with the space mark."""
        return str(self._processor.IdToPiece(token_id))

    def piece_bytes(self) -> npt.NDArray[np.int32]:
        """int32[vocab_size]: the UTF-8 bytes of text that each id stands for; 0 for control pieces and <unk>.

        A line's sum is its length in bytes under `identity` without dummy prefix and where nothing was unknown.
        """
        return self._piece_bytes.copy()

    @cached_property
    def _piece_bytes(self) -> npt.NDArray[np.int32]:
        sizes = np.zeros(self.vocab_size, dtype=np.int32)
        for i in range(self.vocab_size):
            if self._processor.IsByte(i):
                sizes[i] = 1
            elif not (self._processor.IsControl(i) or self._processor.IsUnknown(i)):
                sizes[i] = len(self.piece(i).replace(SPACE_MARK, " ").encode())
        return sizes

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The ids of the byte-fallback pieces, <0x00> to <0xFF>."""
        return frozenset(i for i in range(self.vocab_size) if self._processor.IsByte(i))

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids that no text gives: <s>, </s>, <pad>, the extra ids."""
        return frozenset(i for i in range(self.vocab_size) if self._processor.IsControl(i))

    @cached_property
    def sha256(self) -> str:
        """The content hash of the model file, by which the data and the run name their tokenizer."""
        return hashlib.sha256(self._model).hexdigest()

    @property
    def model_bytes(self) -> bytes:
        """The model file's bytes as they were read."""
        return self._model

    def __reduce__(self) -> tuple[type["Encoder"], tuple[Path]]:
        return Encoder, (self.model_path,)


_KNOWN_VERSION = "0.2.3"
_PLAIN = (False, -1, 0.1, False, False, False)
"""The positional arguments that mean: no sampling (with its two settings), no <s>, no </s>, not reversed."""


def _buffer_methods(processor: Any) -> tuple[Callable[[str], Any], Callable[[list[str]], Sequence[Any]]]:
    """One line, and many lines, to buffers of int32 ids."""
    if sentencepiece.__version__ != _KNOWN_VERSION:
        return processor.EncodeAsNumpy, lambda lines: processor.EncodeAsNumpy(lines, num_threads=1)
    inner = processor._processor
    one, many = inner._EncodeAsBuffer, inner._EncodeAsBufferBatch
    return lambda line: one(line, *_PLAIN), lambda lines: many(lines, 1, None, *_PLAIN)


def _read_model(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UserError(Fault(str(path), "there is no such tokenizer file", remedy="make one with step 1")) from error
    if not content:
        raise UserError(Fault(str(path), "the tokenizer file is empty", remedy="make one with step 1"))
    return content
