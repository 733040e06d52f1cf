"""A SentencePiece `.model` file as pieces, and the changes made to it after training.

The file is a protocol buffer (`sentencepiece_model.proto`, sentencepiece 0.2.3): a list of pieces (text, score, type),
the trainer's settings, and the normaliser's settings with its compiled table. The id of a piece is its index in the
list. Only this module names the vendor's types.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

from sentencepiece import sentencepiece_model_pb2 as messages

NEWLINE = "\n"
SPACE_MARK = "\u2581"
"""The character for a space inside pieces: SentencePiece takes it for a space in text too."""
SCORE_STEP = 1 / 256
"""Unigram scores are rounded to multiples of this. A float32 holds sums of such numbers exactly up to 2**24 steps, a
total of 65,536, which a line of some 5,000 tokens reaches. SentencePiece (float32) and Hugging Face's tokenizers
(float64) then compute the same totals and break ties the same way, where rounding would decide otherwise. It changes a
piece's probability by at most 0.2 %, far less than another sample of the text would."""


class PieceType(IntEnum):
    """The type of a piece, by its number in the file format."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    text: str
    score: float
    type: PieceType

    @property
    def text_bytes(self) -> bytes:
        """The piece's text in UTF-8; empty for control pieces and <unk>."""
        if self.type in (PieceType.CONTROL, PieceType.UNKNOWN):
            return b""
        if self.type is PieceType.BYTE:  # <0x0A>
            return bytes([int(self.text[1:-1], 16)])
        return self.text.replace(SPACE_MARK, " ").encode()


class ModelFile:
    """The contents of a valid `.model` file: an encoder or the trainer has made or opened it."""

    def __init__(self, content: bytes) -> None:
        self._proto: Any = messages.ModelProto()
        self._proto.ParseFromString(content)
        trainer, normalizer = self._proto.trainer_spec, self._proto.normalizer_spec
        self.is_unigram: bool = trainer.model_type == messages.TrainerSpec.UNIGRAM
        self.is_bpe: bool = trainer.model_type == messages.TrainerSpec.BPE
        self.byte_fallback: bool = trainer.byte_fallback
        self.whitespace_as_suffix: bool = trainer.treat_whitespace_as_suffix
        """True if pieces end with the space mark instead of starting with it."""
        self.id_of: dict[str, int] = {name: getattr(trainer, f"{name}_id") for name in ("unk", "bos", "eos", "pad")}
        """Ids of the special pieces; -1 where there is none."""
        self.add_dummy_prefix: bool = normalizer.add_dummy_prefix
        """True if a space is put before each line; may be changed."""
        self.remove_extra_whitespaces: bool = normalizer.remove_extra_whitespaces
        self.normalization: str = normalizer.name
        self.charsmap: bytes = normalizer.precompiled_charsmap
        """The compiled normalisation table; empty for `identity`."""

    @cached_property
    def pieces(self) -> list[Piece]:
        return [Piece(piece.piece, piece.score, PieceType(piece.type)) for piece in self._proto.pieces]

    def set_scores(self, scores: Mapping[int, float]) -> None:
        for i, score in scores.items():
            self._proto.pieces[i].score = score
        self.__dict__.pop("pieces", None)

    def rename(self, names: Mapping[int, str]) -> None:
        for i, name in names.items():
            self._proto.pieces[i].piece = name
        self._proto.trainer_spec.unk_piece = self._proto.pieces[self.id_of["unk"]].piece
        self.__dict__.pop("pieces", None)

    def append_controls(self, names: Iterable[str]) -> None:
        """Add control pieces of these names at the end."""
        for name in names:
            self._proto.pieces.add(piece=name, score=0.0, type=int(PieceType.CONTROL))
            self._proto.trainer_spec.control_symbols.append(name)
        self._proto.trainer_spec.vocab_size = len(self._proto.pieces)
        self.__dict__.pop("pieces", None)

    def append_sentinels(self, number: int) -> None:
        """Add the sentinel tokens <extra_id_{number-1}> to <extra_id_0>, as control pieces."""
        self.append_controls(f"<extra_id_{i}>" for i in reversed(range(number)))

    def to_bytes(self) -> bytes:
        self._proto.normalizer_spec.add_dummy_prefix = self.add_dummy_prefix
        return bytes(self._proto.SerializeToString(deterministic=True))
