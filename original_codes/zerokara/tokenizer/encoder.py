"""Text to token ids (int32 arrays, without an end-of-document id) and back, as SentencePiece defines them.

With a tokenizer of step 1 the ids of a document are the ids of its lines, each encoded by itself, joined by the id of
the piece "\\n". Lines, because SentencePiece's unigram search adds scores in float32: on a document of some thousand
tokens the rounding now and then picks another segmentation than on the line alone, and then no second implementation
(Hugging Face's, in float64) could agree with it. Only "\\n" ends a line: "\\r", U+2028 and form feeds are characters
like any other. With any other tokenizer the ids are SentencePiece's for the whole document, on which the models that go
with it were trained. Control pieces are never matched in text: a text that spells "</s>" is text.

A text is split into *runs*, each encoded in one call, since a call for each line takes a third longer. A run holds
several lines where their ids are the same as alone: no piece crosses a line end, so the lines of a run affect each
other only through rounding. Source: sentencepiece 0.2.3, `SentencePieceProcessor`.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby, islice, pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from zerokara.base.errors import Fault, UserError
from zerokara.base.manifest import Inputs
from zerokara.tokenizer import MODEL_NAME
from zerokara.tokenizer.model_file import NEWLINE, SCORE_STEP, ModelFile, PieceType

Ids = npt.NDArray[np.int32]
Joined = tuple[Ids, list[int]]
"""The ids of documents, concatenated, each with its end and its start, if any; the UTF-8 bytes of each text."""

NUM_T5_SENTINELS = 100
"""Google's T5 models (spiece.model) hold no sentinels: seqio's `SentencePieceVocabulary(extra_ids=100)`, transformers'
`T5Tokenizer` and we append these to the pieces, <extra_id_0> last; the file and its hash stay what they are."""
UNKNOWN_PENALTY = 10.0
"""SentencePiece subtracts this from the lowest score for a character without a piece (`kUnkPenalty`)."""
_EXACT_TOTAL = 2.0**15
"""Below this total a float32 resolves half a `SCORE_STEP`, so that rounding changes the order of no two paths."""
_FIRST_PIECES = ("<unk>", "<s>", "</s>", "<pad>", NEWLINE)


class Encoder:
    """A tokenizer opened from a `.model` file, cheap to open and to pickle; for training, `open_encoder` opens it.

    Raises:
        UserError: the file is no SentencePiece model.
    """

    library = "sentencepiece"
    """Package that encodes."""

    def __init__(self, model_path: str | Path, content: bytes = b"") -> None:
        """`content` is that of the file, where it has been read already."""
        self.model_path = Path(model_path)
        self.model_bytes = content or (self.model_path.read_bytes() if self.model_path.is_file() else b"")
        self.run_files = {MODEL_NAME: self.model_bytes}
        """Contents of the files that a run folder keeps, by their names there."""
        self._processor, self._model = _opened(self.model_bytes, str(self.model_path))
        self.faults = _faults(self._processor, str(self.model_path))
        """What a model cannot be trained with: no end-of-document id, or no ids for line ends."""
        self.adds_sentinels = self._model is not self.model_bytes
        """True if the last ids are T5's sentinel tokens, which are not in the file."""
        self.vocab_size: int = self._processor.GetPieceSize()
        self.unk_id: int = self._processor.unk_id()
        self.bos_id: int = self._processor.bos_id()
        """-1 where the model has none."""
        self.eos_id: int = self._processor.eos_id()
        self.start_id = -1
        """Id that begins every document, because the tokenizer puts it before a text; -1 if it puts nothing there."""
        own_pad: int = self._processor.pad_id()
        self.pad_id = own_pad if own_pad not in (-1, self.eos_id) else self.unk_id
        """<unk> where the model has no <pad>, because </s> ends every text, and <unk> is in no text worth learning."""
        self.newline_id: int = self._processor.PieceToId(NEWLINE)
        """The id of the piece "\\n"; `unk_id` where there is none."""
        # Other models hold a piece "\n" too, without splitting at it: Gemma's has one for each number of line ends.
        firsts = map(self._processor.IdToPiece, range(min(len(_FIRST_PIECES), self.vocab_size)))
        self.by_line = (*firsts,) == _FIRST_PIECES
        """True if each line is encoded by itself, as in every tokenizer of step 1; else whole documents are."""
        encode = self._processor.EncodeAsIds
        self._prefixes_lines = self.by_line and encode("a") != encode("\na")[1:]
        self._line_end = np.int32(self.newline_id).tobytes()

    @cached_property
    def run_characters(self) -> int:
        """Characters of several lines that may be encoded at once without changing their ids; 0: single lines.

        No segmentation of a unigram that matters scores worse than one piece per character, each at worst unknown. So
        a run of n characters has a total of at most n · (|lowest score| + penalty), and up to `_EXACT_TOTAL` sums of
        multiples of `SCORE_STEP` keep their order. The score of "\\n" is none, but shifts all paths equally.
        """
        model = self.model
        scores = np.array([piece.score for piece in model.pieces if piece.type is PieceType.NORMAL] or [1.0])
        is_plain = model.is_unigram and model.normalization == "identity" and not model.add_dummy_prefix
        is_exact = (scores <= 0).all() and not np.modf(scores / SCORE_STEP)[0].any()
        is_one_kind = self.symbols == [NEWLINE] and not any(NEWLINE in model.pieces[i].text for i in self.learnt_ids)
        return int(_EXACT_TOTAL / (UNKNOWN_PENALTY - scores.min())) if is_plain and is_exact and is_one_kind else 0

    def runs(self, text: str) -> list[str]:
        """Split at line ends into runs of up to `run_characters` characters; a longer line is a run by itself.

        The line ends between runs are left out. A text that is not encoded by lines is one run.
        """
        if not self.by_line:
            return [text]
        limit = self.run_characters
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

    def encode(self, text: str) -> Ids:
        """Return the ids of one document, without the end-of-document id."""
        return self.encode_many([text])[0]

    def prompt_ids(self, prompt: str) -> list[int]:
        """Return the ids of a prompt as the beginning of a document; those of an empty prompt are [`before_text`]."""
        before = [self.start_id] if self.start_id >= 0 else []
        return before + self.encode(prompt).tolist() or [self.before_text]

    def encode_many(self, texts: Iterable[str]) -> list[Ids]:
        """Return the ids of each document, as `encode` does; a thread pool pays over some hundred documents."""
        return [np.frombuffer(ids, dtype=np.int32) for ids in self._id_bytes(texts)]

    def encode_joined(self, texts: Sequence[str]) -> Joined:
        """Return the ids of many documents as in a token file, and the UTF-8 bytes of each text."""
        start, end = (b"" if i < 0 else np.int32(i).tobytes() for i in (self.start_id, self.eos_id))
        ids = np.frombuffer(b"".join(start + ids + end for ids in self._id_bytes(texts)), dtype=np.int32)
        return ids, [len(text) if text.isascii() else len(text.encode()) for text in texts]

    def _id_bytes(self, texts: Iterable[str]) -> Iterator[Any]:
        run_lists = [self.runs(text) for text in texts]
        ids = iter(self._processor.EncodeAsNumpy([run for runs in run_lists for run in runs], num_threads=1))
        for runs in run_lists:
            yield self._line_end.join(islice(ids, len(runs)))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text of a document; control ids give none, bytes that are no UTF-8 give U+FFFD."""
        tokens, decode = [int(i) for i in ids], self._processor.DecodeIds
        if not self._prefixes_lines:
            return decode(tokens)
        # Each line has a dummy prefix, and SentencePiece removes it only from the start of a text.
        ends = [-1, *(place for place, i in enumerate(tokens) if i == self.newline_id), len(tokens)]
        return NEWLINE.join(decode(tokens[before + 1 : end]) for before, end in pairwise(ends))

    @property
    def before_text(self) -> int:
        """The id before a document's text: `start_id`, or the end of the previous document if there is no start."""
        return self.start_id if self.start_id >= 0 else self.eos_id

    @cached_property
    def token_texts(self) -> list[bytes]:
        """The UTF-8 bytes of text that each id stands for; none for control pieces and <unk>.

        Those of a line without unknown characters join to the line as it is normalised, with the dummy prefix.
        """
        return [piece.text_bytes for piece in self.model.pieces]

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids that no text gives: <s>, </s>, <pad>, reserved pieces, the sentinel tokens."""
        return frozenset(i for i, piece in enumerate(self.model.pieces) if piece.type is PieceType.CONTROL)

    @property
    def learnt_ids(self) -> list[int]:
        """Ids of the pieces that a training found: not of control pieces, bytes and a user's symbols."""
        return [i for i, piece in enumerate(self.model.pieces) if piece.type is PieceType.NORMAL]

    def spans(self, line: str) -> list[tuple[int, int, int]]:
        """Return the ids of a line, each with start and end of the characters that it stands for, if any."""
        mapping = self._processor.EncodeAsOffsetMapping(line)
        return [(i, *offsets) for i, offsets in zip(mapping["ids"], mapping["offsets"], strict=True)]

    @property
    def description(self) -> str:
        """The kind of tokenizer, for display."""
        kind = "unigram" if self.model.is_unigram else "BPE" if self.model.is_bpe else "word or character"
        return f"SentencePiece {kind}" + (", byte fallback" if self.model.byte_fallback else "")

    @property
    def special_ids(self) -> set[int]:
        """Control ids, and that of <unk> where there is one."""
        return {*self.control_ids, self.unk_id} - {-1}

    @cached_property
    def pieces(self) -> list[str]:
        """Pieces by id, as they are in the vocabulary, with the space mark."""
        return [piece.text for piece in self.model.pieces]

    @property
    def symbols(self) -> list[str]:
        """User-defined pieces, at which any text is cut."""
        return [piece.text for piece in self.model.pieces if piece.type is PieceType.USER_DEFINED]

    @cached_property
    def sentinel_ids(self) -> list[int]:
        """Ids of <extra_id_0>, <extra_id_1>, …; empty without `extra_ids`."""
        id_of = {self.pieces[i]: i for i in self.control_ids}
        names = (f"<extra_id_{number}>" for number in range(len(id_of)))
        return [id_of[name] for name in takewhile(id_of.__contains__, names)]

    def decode_continuation(self, ids: Sequence[int]) -> str:
        """Return the text of ids that continue others: with sentinel tokens by name, and its leading space, if any."""
        before = self.encode("a").tolist()  # so that no dummy prefix is taken off
        sentinels, start, text = set(self.sentinel_ids), len(self.decode(before)), ""
        for is_sentinel, group in groupby(ids, sentinels.__contains__):
            some = list(group)
            text += "".join(self.pieces[i] for i in some) if is_sentinel else self.decode([*before, *some])[start:]
        return text

    @cached_property
    def model(self) -> ModelFile:
        """Contents of the model file, with T5's sentinel tokens where they were added; not to be changed."""
        return ModelFile(self._model)

    @cached_property
    def sha256(self) -> str:
        """Content hash of the model file, which identifies the tokenizer of token files and runs."""
        return hashlib.sha256(self.model_bytes).hexdigest()

    @property
    def record(self) -> Inputs:
        """The tokenizer as an input of a step, for its manifest; its hash is `sha256`."""
        return self.model_path

    def __reduce__(self) -> tuple[Any, ...]:
        return Encoder, (self.model_path, self.model_bytes)


def _opened(content: bytes, where: str) -> tuple[Any, bytes]:
    """Return the processor of a model file, and the model that it has open, with T5's sentinels if they are missing."""
    remedy = "make one with step 1, and name its tokenizer.model"
    if not content:
        raise UserError(Fault(where, "there is no such tokenizer file, or it is empty", remedy=remedy))
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise UserError(Fault(where, f"is not a SentencePiece model ({error})", remedy=remedy)) from error
    special = (processor.pad_id(), processor.eos_id(), processor.unk_id(), processor.bos_id())
    sentinels = [processor.PieceToId(name) for name in ("<extra_id_0>", "\u2581<extra_id_0>")]
    if special == (0, 1, 2, -1) and sentinels == [processor.unk_id()] * 2:
        model = ModelFile(content)
        model.append_sentinels(NUM_T5_SENTINELS)
        content = model.to_bytes()
        processor.LoadFromSerializedProto(content)
    return processor, content


def _faults(processor: Any, where: str) -> list[Fault]:
    """Return what is missing for training: an end-of-document piece, or ids for line ends.

    These are a piece, bytes (Llama 2: <0x0A>), or the space that normalisation makes of a line end (T5). A missing
    <pad> is no fault (`Encoder.pad_id`).
    """
    faults = []
    if processor.eos_id() < 0:
        remedy = "use a tokenizer that has one, or train one with step 1"
        faults.append(Fault(where, "has no </s> piece (eos_id -1), which ends each document", remedy=remedy))
    if processor.unk_id() in processor.EncodeAsIds(NEWLINE):
        rule = (
            'encodes each line end as <unk>, so that lines cannot be learnt: it has no piece "\\n", no byte pieces '
            "(byte_fallback), and no normalisation that makes it a space (nmt_nfkc)"
        )
        faults.append(Fault(where, rule, remedy="use a tokenizer that has one of these, or train one with step 1"))
    return faults
