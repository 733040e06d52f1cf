"""The unit of text whose ids SentencePiece defines: a line for the tokenizers of step 1, else a whole document.

Both split a text into *runs*, each encoded in one call, since a call for each line takes a third longer, and join the
buffers of int32 ids that SentencePiece gave for them.

- `Lines`: a run holds several lines where their ids are the same as alone: no piece crosses a line end, so the lines of
  a run affect each other only through rounding, and sums are exact as long as they are small enough.
- `Documents`: a document's ids are SentencePiece's own for the whole text. It begins with the dummy prefix, if there is
  one, and its lines do not. A long text is still split before line ends where no piece spans them: later runs begin
  with their line end, so that the prefix is a token of its own before it, which is removed from their ids again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerokara.tokenizer.model_file import SCORE_STEP, ModelFile, PieceType

NEWLINE = "\n"
UNKNOWN_PENALTY = 10.0
"""SentencePiece subtracts this from the lowest score for a character without a piece (`kUnkPenalty`)."""
UNSPLIT = sys.maxsize
"""The limit where a text must not be split."""
_EXACT_TOTAL = 2.0**15
"""Below this total a float32 resolves half a `SCORE_STEP`, so that rounding changes the order of no two paths."""
_BPE_RUN_CHARACTERS = 1 << 20
_FIRST_PIECES = ("<unk>", "<s>", "</s>", "<pad>", NEWLINE)


@dataclass(frozen=True)
class Lines:
    """Each line by itself."""

    decode_ids: Callable[[list[int]], str]
    newline_id: int
    prefixes_lines: bool
    """Whether a space is put before each line."""

    def limit(self, model: ModelFile) -> int:
        """As many characters as keep sums of scores exact, so that the lines of a run do not affect each other's ids.

        No segmentation that matters scores worse than one piece per character, each at worst unknown. So a run of n
        characters has a total of at most n · (|lowest score| + penalty), and up to `_EXACT_TOTAL` sums of multiples of
        `SCORE_STEP` keep their order. The score of "\\n" is no such multiple, but it is in every path, and so shifts
        all of them equally. 0: only single lines.
        """
        if model.normalization != "identity" or model.add_dummy_prefix or _crosses_lines(model):
            return 0
        if model.is_bpe:
            return _BPE_RUN_CHARACTERS
        scores = np.array([piece.score for piece in model.pieces if piece.type is PieceType.NORMAL] or [1.0])
        symbols = sum(piece.type is PieceType.USER_DEFINED for piece in model.pieces) - 1
        if not model.is_unigram or symbols or (scores > 0).any() or np.modf(scores / SCORE_STEP)[0].any():
            return 0
        return int(_EXACT_TOTAL / (UNKNOWN_PENALTY - scores.min()))

    def runs(self, text: str, limit: int) -> list[str]:
        """Split at line ends into runs of lines, without the line ends between them."""
        return _runs(text, limit, 1) if limit else text.split(NEWLINE)

    def join(self, ids: Sequence[Any]) -> Any:
        """Join with the id of the line end."""
        return ids[0] if len(ids) == 1 else np.int32(self.newline_id).tobytes().join(ids)

    def decode(self, ids: list[int]) -> str:
        """Decode by lines where each has a dummy prefix: SentencePiece removes it only from the start of a text."""
        if not self.prefixes_lines:
            return self.decode_ids(ids)
        lines: list[list[int]] = [[]]
        for i in ids:
            if i == self.newline_id:
                lines.append([])
            else:
                lines[-1].append(i)
        return NEWLINE.join(map(self.decode_ids, lines))


@dataclass(frozen=True)
class Documents:
    """The whole text of a document."""

    decode_ids: Callable[[list[int]], str]
    line_end_ids: list[int]
    """The ids of a text that is one line end, after those of the dummy prefix."""

    def limit(self, model: ModelFile) -> int:
        """BPE adds nothing up, so that only a piece that spans a line end forbids a split before it."""
        changes_text = model.charsmap or model.remove_extra_whitespaces or model.whitespace_as_suffix
        is_one_id = len(self.line_end_ids) == (2 if model.add_dummy_prefix else 1)
        if not model.is_bpe or changes_text or _crosses_lines(model) or not is_one_id:
            return UNSPLIT
        return _BPE_RUN_CHARACTERS

    def runs(self, text: str, limit: int) -> list[str]:
        """Split before line ends; later runs begin with theirs."""
        return _runs(text, limit, 0)

    def join(self, ids: Sequence[Any]) -> Any:
        """Concatenate, without the prefix that SentencePiece put before the later ones."""
        if len(ids) == 1:
            return ids[0]
        prefix = len(self.line_end_ids) - 1
        further = (np.frombuffer(each, dtype=np.int32)[prefix:].tobytes() for each in ids[1:])
        return b"".join((ids[0], *further))

    def decode(self, ids: list[int]) -> str:
        """Decode as SentencePiece does."""
        return self.decode_ids(ids)


TextUnit = Lines | Documents


def unit_of(processor: Any) -> TextUnit:
    """The unit of a model that a SentencePieceProcessor has opened: lines where its first pieces are those of step 1.

    Another model may hold a piece "\\n" too, without splitting at it: Gemma's has one for each number of line ends, and
    Llama's dummy prefix precedes whole documents only.
    """
    first = tuple(map(processor.IdToPiece, range(min(len(_FIRST_PIECES), processor.GetPieceSize()))))
    if first != _FIRST_PIECES:
        return Documents(processor.DecodeIds, processor.EncodeAsIds(NEWLINE))
    prefixes_lines = processor.EncodeAsIds("a") != processor.EncodeAsIds("\na")[1:]
    return Lines(processor.DecodeIds, len(_FIRST_PIECES) - 1, prefixes_lines)


def _runs(text: str, limit: int, skipped: int) -> list[str]:
    """Split a text at line ends into runs of up to `limit` characters; a longer line is a run by itself.

    `skipped` is 1 where the line ends between the runs are left out, 0 where the later runs begin with theirs.
    """
    runs, start = [], 0
    while len(text) - start > limit:
        first = start + 1 - skipped  # the line end with which a run begins does not end it
        end = text.rfind(NEWLINE, first, start + limit + 1)
        end = text.find(NEWLINE, first + limit) if end < 0 else end
        if end < 0:
            break
        runs.append(text[start:end])
        start = end + skipped
    return [*runs, text[start:]]


def _crosses_lines(model: ModelFile) -> bool:
    """Whether a piece holds a line end and something else."""
    kinds = (PieceType.NORMAL, PieceType.USER_DEFINED)
    return any(NEWLINE in piece.text and piece.text != NEWLINE for piece in model.pieces if piece.type in kinds)
