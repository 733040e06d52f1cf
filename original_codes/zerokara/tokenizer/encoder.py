"""Text to token ids and back, as SentencePiece defines them, one line at a time.

In: text. Out: int32 arrays of ids, without an end-of-document id.

The ids of a document are the ids of its lines, each encoded by itself, joined by the id of the piece "\\n".
Lines, because SentencePiece's unigram search adds scores in float32: on a document of some thousand tokens the
rounding picks now and then another segmentation than on the line alone, and then no second implementation
(Hugging Face's, in float64) could agree with it. A line ends at "\\n" and nowhere else: "\\r", U+2028 and form
feeds are characters like any other. Control pieces are of type CONTROL, which SentencePiece never matches in text:
a text that spells "</s>" is text.

A call for each line takes a third longer than one for the whole text, so lines are encoded in *runs*, where that is
the same: no piece crosses a line end, so the lines of a run touch each other's segmentation only through rounding,
and there is none as long as the sums are small enough (`_run_characters`). BPE adds nothing up; its runs are of any
length.

Source: sentencepiece 0.2.3, `SentencePieceProcessor`. Measured there: a list call builds a thread pool, which pays over
some hundred documents and makes one short document five times slower; the Python layer round a call takes longer than
the encoding of a short line, so where the version is the known one its inner methods are called.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from zerokara.errors import Fault, UserError
from zerokara.tokenizer.choice import check_there
from zerokara.tokenizer.model_file import SCORE_STEP, Kind, ModelFile

Ids = npt.NDArray[np.int32]
Joined = tuple[Ids, list[int]]
"""The ids of documents one after another, each with its end; the bytes of UTF-8 text of each."""

NEWLINE = "\n"
SPACE_MARK = "\u2581"
"""The character that stands for a space inside pieces: SentencePiece reads it, in text too, as a space."""
UNKNOWN_PENALTY = 10.0
"""What SentencePiece takes off the lowest score for a character without a piece (`kUnkPenalty`)."""
_EXACT_TOTAL = 2.0**15
"""Below this total a float32 holds half a `SCORE_STEP`, so that rounding orders no two paths otherwise."""
_BPE_RUN_CHARACTERS = 1 << 20


class Encoder:
    """The tokenizer that training uses: opened from a `.model` file, cheap to open and to pickle.

    Raises: UserError when the file is no SentencePiece model or lacks what training needs (a piece for the line
    end, an end-of-document id, a padding id that is another).
    """

    def __init__(self, model_path: str | Path, run_characters: int | None = None) -> None:
        """`run_characters` saves looking through the model for it, where another process has done so."""
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
        self._newline, self._end = np.int32(self.newline_id).tobytes(), np.int32(self.eos_id).tobytes()
        self._line_ids, self._batch_ids = _buffer_methods(self._processor)
        self._prefixes_lines = self._processor.EncodeAsIds("a") != self._processor.EncodeAsIds("\na")[1:]
        if run_characters is not None:
            self.run_characters = run_characters

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

    @cached_property
    def run_characters(self) -> int:
        """Characters of several lines that may be encoded at once, with the ids of each line alone; 0: only lines."""
        return _run_characters(self.model)

    def encode(self, text: str) -> Ids:
        """The ids of one document, without the end-of-document id."""
        line_ids = self._line_ids
        return np.frombuffer(self._newline.join([line_ids(run) for run in self._runs(text)]), dtype=np.int32)

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids of a prompt; an empty one starts a document, as in training: after the end of the one before."""
        return [int(token) for token in self.encode(prompt)] or [self.eos_id]

    def encode_many(self, texts: Iterable[str]) -> list[Ids]:
        """The ids of each document, the same as `encode` gives; hand it some hundred documents at a time."""
        return [np.frombuffer(ids, dtype=np.int32) for ids in self._id_bytes(texts)]

    def encode_joined(self, texts: Sequence[str]) -> Joined:
        """The ids of many documents as they stand in a token file, and the bytes that each has as UTF-8 text."""
        ids = np.frombuffer(self._end.join([*self._id_bytes(texts), b""]), dtype=np.int32)
        return ids, [len(text) if text.isascii() else len(text.encode()) for text in texts]

    def _id_bytes(self, texts: Iterable[str]) -> Iterator[Any]:
        """The ids of each document, as bytes."""
        run_lists = [self._runs(text) for text in texts]
        ids = self._batch_ids([run for runs in run_lists for run in runs])
        start = 0
        for runs in run_lists:
            end = start + len(runs)
            yield ids[start] if end == start + 1 else self._newline.join(ids[start:end])
            start = end

    def _runs(self, text: str) -> list[str]:
        """Cut a text at line ends into runs of lines that are encoded at once; a longer line is a run by itself."""
        limit = self.run_characters
        if len(text) <= limit:
            return [text]
        if not limit:
            return text.split(NEWLINE)
        runs, start = [], 0
        while len(text) - start > limit:
            end = text.rfind(NEWLINE, start, start + limit + 1)
            end = text.find(NEWLINE, start + limit) if end < 0 else end
            if end < 0:
                break
            runs.append(text[start:end])
            start = end + 1
        return [*runs, text[start:]]

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
        return frozenset(i for i, piece in enumerate(self.model.pieces) if piece.kind is Kind.CONTROL)

    @cached_property
    def sentinel_ids(self) -> list[int]:
        """The ids of <extra_id_0>, <extra_id_1>, …; empty without `extra_ids`."""
        there = {self.piece(i): i for i in self.control_ids}
        names = (f"<extra_id_{number}>" for number in range(len(there)))
        return [there[name] for name in takewhile(there.__contains__, names)]

    def spelt(self, ids: Sequence[int]) -> str:
        """The text with its sentinels by name, which `decode` leaves out."""
        sentinels, parts, rest = set(self.sentinel_ids), list[str](), list[int]()
        for token in ids:
            if token in sentinels:
                parts += [self.decode(rest), self.piece(token)]
                rest = []
            else:
                rest.append(token)
        return "".join([*parts, self.decode(rest)])

    @cached_property
    def model(self) -> ModelFile:
        """What stands in the model file; not to be changed."""
        return ModelFile(self._model)

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


def _run_characters(model: ModelFile) -> int:
    """How many characters of several lines may be encoded at once with the ids of each line alone; 0: only lines.

    No segmentation that matters scores worse than one piece a character, each at worst unknown. So a run of n
    characters has a total of at most n · (|lowest score| + penalty), and up to `_EXACT_TOTAL` sums of multiples of
    `SCORE_STEP` keep their order. The score of "\\n" is no such multiple, but every path goes through it, and is moved
    alike.
    """
    kinds = (Kind.NORMAL, Kind.USER_DEFINED)
    crossing = any(NEWLINE in piece.text and piece.text != NEWLINE for piece in model.pieces if piece.kind in kinds)
    if model.normalization != "identity" or model.add_dummy_prefix or crossing:
        return 0
    if model.is_bpe:
        return _BPE_RUN_CHARACTERS
    scores = np.array([piece.score for piece in model.pieces if piece.kind is Kind.NORMAL] or [1.0])
    symbols = sum(piece.kind is Kind.USER_DEFINED for piece in model.pieces) - 1
    if not model.is_unigram or symbols or (scores > 0).any() or np.modf(scores / SCORE_STEP)[0].any():
        return 0
    return int(_EXACT_TOTAL / (UNKNOWN_PENALTY - scores.min()))


def _read_model(path: Path) -> bytes:
    check_there(path)
    return path.read_bytes()
