"""Text to token ids and back, as SentencePiece defines them.

In: text. Out: int32 arrays of ids, without an end-of-document id.

With a tokenizer of step 1 the ids of a document are the ids of its lines, each encoded by itself, joined by the id of
the piece "\\n". Lines, because SentencePiece's unigram search adds scores in float32: on a document of some thousand
tokens the rounding now and then picks another segmentation than on the line alone, and then no second implementation
(Hugging Face's, in float64) could agree with it. Only "\\n" ends a line: "\\r", U+2028 and form feeds are characters
like any other. With any other tokenizer the ids are SentencePiece's for the whole document, on which the models that go
with it were trained. Control pieces are never matched in text: a text that spells "</s>" is text. `units` says how a
text is cut into the *runs* that are encoded in one call.

Source: sentencepiece 0.2.3, `SentencePieceProcessor`. Measured: a list call builds a thread pool, which pays over some
hundred documents and makes one short document five times slower; the Python layer around a call takes longer than
encoding a short line, so with the known version its inner methods are called.
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
from zerokara.tokenizer.model_file import ModelFile, PieceType
from zerokara.tokenizer.units import TextUnit

Ids = npt.NDArray[np.int32]
Joined = tuple[Ids, list[int]]
"""The ids of documents, concatenated, each with its end-of-document id; the UTF-8 bytes of each text."""

NUM_T5_SENTINELS = 100
"""Google's T5 models (spiece.model) hold no sentinels: whoever opens one appends these to its pieces, <extra_id_0> last
(t5/seqio `SentencePieceVocabulary(extra_ids=100)`, transformers 5.23 `T5Tokenizer`). So do we; the file and its hash
stay what they are."""


class Encoder:
    """The tokenizer that training uses: opened from a `.model` file, cheap to open and to pickle.

    Raises:
        UserError: the file is no SentencePiece model, or lacks an end-of-document id or ids for line ends.
    """

    def __init__(self, model_path: str | Path, run_characters: int | None = None) -> None:
        """`run_characters` is the property of that name, where another process has computed it."""
        self.model_path = Path(model_path)
        self.model_bytes = self.model_path.read_bytes() if self.model_path.is_file() else b""
        """The bytes of the model file."""
        self._processor, self._model = _opened(self.model_bytes, str(self.model_path))
        self.adds_sentinels = self._model is not self.model_bytes
        """Whether the last ids are T5's sentinel tokens, which are not in the file."""
        self.vocab_size: int = self._processor.GetPieceSize()
        self.unk_id: int = self._processor.unk_id()
        self.bos_id: int = self._processor.bos_id()
        """-1 where the model has none."""
        self.eos_id: int = self._processor.eos_id()
        own_pad: int = self._processor.pad_id()
        self.pad_id = own_pad if own_pad not in (-1, self.eos_id) else self.unk_id
        """<unk> where the model has no <pad>, because </s> ends every text, and <unk> is in no text worth learning."""
        self.newline_id: int = self._processor.PieceToId("\n")
        """The id of the piece "\\n"; `unk_id` where there is none."""
        self._end = np.int32(self.eos_id).tobytes()
        self._line_ids, self._batch_ids = _buffer_methods(self._processor)
        self._unit = TextUnit(self._processor)
        self.by_line = self._unit.by_line
        """Whether each line is encoded by itself, as in every tokenizer of step 1."""
        if run_characters is not None:
            self.run_characters = run_characters

    @cached_property
    def run_characters(self) -> int:
        """Characters of several lines that may be encoded at once without changing their ids; 0: single lines."""
        return self._unit.limit(self.model)

    def encode(self, text: str) -> Ids:
        """Return the ids of one document, without the end-of-document id."""
        return np.frombuffer(self._unit.join([self._line_ids(run) for run in self._runs(text)]), dtype=np.int32)

    def prompt_ids(self, prompt: str) -> list[int]:
        """Return the ids of a prompt; an empty prompt is </s>, after which training has a new document."""
        return [int(token) for token in self.encode(prompt)] or [self.eos_id]

    def encode_many(self, texts: Iterable[str]) -> list[Ids]:
        """Return the ids of each document, as `encode` does; fastest with some hundred documents at a time."""
        return [np.frombuffer(ids, dtype=np.int32) for ids in self._id_bytes(texts)]

    def encode_joined(self, texts: Sequence[str]) -> Joined:
        """Return the ids of many documents as in a token file, and the UTF-8 bytes of each text."""
        ids = np.frombuffer(self._end.join([*self._id_bytes(texts), b""]), dtype=np.int32)
        return ids, [len(text) if text.isascii() else len(text.encode()) for text in texts]

    def _id_bytes(self, texts: Iterable[str]) -> Iterator[Any]:
        """The ids of each document, as bytes."""
        run_lists = [self._runs(text) for text in texts]
        ids = self._batch_ids([run for runs in run_lists for run in runs])
        start = 0
        for runs in run_lists:
            end = start + len(runs)
            yield self._unit.join(ids[start:end])
            start = end

    def _runs(self, text: str) -> list[str]:
        return self._unit.runs(text, self.run_characters)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text of a document; control ids give none, bytes that are no UTF-8 give U+FFFD."""
        return self._unit.decode([int(i) for i in ids])

    def piece(self, token_id: int) -> str:
        """Return the piece as it is in the vocabulary, with the space mark."""
        return str(self._processor.IdToPiece(token_id))

    def piece_bytes(self) -> npt.NDArray[np.int32]:
        """int32[vocab_size]: the UTF-8 bytes of text that each id stands for; 0 for control pieces and <unk>.

        With `identity`, no dummy prefix and no unknown characters, the sum over a line is its length in bytes. A dummy
        prefix adds a byte; with another normalisation it is the length of the normalised line.
        """
        return np.array([piece.num_bytes for piece in self.model.pieces], dtype=np.int32)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids that no text gives: <s>, </s>, <pad>, reserved pieces, the sentinel tokens."""
        return frozenset(i for i, piece in enumerate(self.model.pieces) if piece.type is PieceType.CONTROL)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The pieces of the special ids, by the names that Hugging Face gives them (``eos_token``)."""
        ids = {"bos": self.bos_id, "eos": self.eos_id, "unk": self.unk_id, "pad": self.pad_id}
        return {f"{name}_token": self.piece(i) for name, i in ids.items() if i >= 0}

    @cached_property
    def sentinel_ids(self) -> list[int]:
        """The ids of <extra_id_0>, <extra_id_1>, …; empty without `extra_ids`."""
        id_of = {self.piece(i): i for i in self.control_ids}
        names = (f"<extra_id_{number}>" for number in range(len(id_of)))
        return [id_of[name] for name in takewhile(id_of.__contains__, names)]

    def decode_continuation(self, ids: Sequence[int]) -> str:
        """Return the text of ids that continue others: with sentinel tokens by name, and its leading space, if any."""
        sentinels, parts, rest = set(self.sentinel_ids), list[str](), list[int]()
        for token in ids:
            if token in sentinels:
                parts += [self._decode_after_text(rest), self.piece(token)]
                rest = []
            else:
                rest.append(token)
        return "".join([*parts, self._decode_after_text(rest)])

    def _decode_after_text(self, ids: list[int]) -> str:
        """Decode ids behind some text, so that no dummy prefix is taken off their start."""
        before = self.encode("a").tolist()
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    @cached_property
    def model(self) -> ModelFile:
        """The contents of the model file, with T5's sentinel tokens where they were added; not to be changed."""
        return ModelFile(self._model)

    @cached_property
    def sha256(self) -> str:
        """The content hash of the model file, which identifies the tokenizer of token files and runs."""
        return hashlib.sha256(self.model_bytes).hexdigest()

    def __reduce__(self) -> tuple[type["Encoder"], tuple[Path, int]]:
        return Encoder, (self.model_path, self.run_characters)


_KNOWN_VERSION = "0.2.3"
_PLAIN = (False, -1, 0.1, False, False, False)
"""Positional arguments: no sampling (with its two settings), no <s>, no </s>, not reversed."""


def _buffer_methods(processor: Any) -> tuple[Callable[[str], Any], Callable[[list[str]], Sequence[Any]]]:
    """Functions from one line, and from many lines, to buffers of int32 ids."""
    if sentencepiece.__version__ != _KNOWN_VERSION:
        return processor.EncodeAsNumpy, lambda lines: processor.EncodeAsNumpy(lines, num_threads=1)
    inner = processor._processor
    one, many = inner._EncodeAsBuffer, inner._EncodeAsBufferBatch
    return lambda line: one(line, *_PLAIN), lambda lines: many(lines, 1, None, *_PLAIN)


def _opened(content: bytes, where: str) -> tuple[Any, bytes]:
    """The processor of a model file, and the model that it has open: with T5's sentinel tokens where they are missing.

    It needs an end-of-document piece and ids for line ends: a piece, bytes (Llama 2: <0x0A>), or, where normalisation
    makes a line end a space (T5), that. A missing <pad> is no fault (`Encoder.pad_id`).
    """
    if not content:
        rule = "there is no such tokenizer file, or it is empty"
        raise UserError(Fault(where, rule, remedy="make one with step 1"))
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        rule = f"is not a SentencePiece model ({error})"
        raise UserError(Fault(where, rule, remedy="make one with step 1")) from error
    found = []
    if processor.eos_id() < 0:
        remedy = "use a tokenizer that has one, or train one with step 1"
        found.append(Fault(where, "has no </s> piece (eos_id -1), which ends each document", remedy=remedy))
    if processor.unk_id() in processor.EncodeAsIds("\n"):
        rule = (
            'encodes each line end as <unk>, so that lines cannot be learnt: it has no piece "\\n", no byte pieces '
            "(byte_fallback), and no normalisation that makes it a space (nmt_nfkc)"
        )
        found.append(Fault(where, rule, remedy="use a tokenizer that has one of these, or train one with step 1"))
    if found:
        raise UserError(found)
    special = (processor.pad_id(), processor.eos_id(), processor.unk_id(), processor.bos_id())
    sentinels = [processor.PieceToId(name) for name in ("<extra_id_0>", "\u2581<extra_id_0>")]
    if special == (0, 1, 2, -1) and sentinels == [processor.unk_id()] * 2:
        model = ModelFile(content)
        model.append_sentinels(NUM_T5_SENTINELS)
        content = model.to_bytes()
        processor.LoadFromSerializedProto(content)
    return processor, content
