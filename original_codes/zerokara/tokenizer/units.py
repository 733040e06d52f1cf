"""The unit of text whose ids SentencePiece defines: a line for the tokenizers of step 1, else a whole document.

A text is split into *runs*, each encoded in one call, since a call for each line takes a third longer.

- Lines: a run holds several where their ids are the same as alone: no piece crosses a line end, so the lines of a run
  affect each other only through rounding, and sums are exact as long as they are small enough.
- Documents: the ids are SentencePiece's own for the whole text. It begins with the dummy prefix, if there is one, and
  its lines do not. A long text is still split before line ends where no piece spans them: later runs begin with their
  line end, so that the prefix is a token of its own before it, which is removed from their ids again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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


class TextUnit:
    """The unit of a model that a SentencePieceProcessor has opened: lines where its first pieces are those of step 1.

    Another model may hold a piece "\\n" too, without splitting at it: Gemma's has one for each number of line ends, and
    Llama's dummy prefix precedes whole documents only.
    """

    def __init__(self, processor: Any) -> None:
        num_first = min(len(_FIRST_PIECES), processor.GetPieceSize())
        self.by_line = tuple(map(processor.IdToPiece, range(num_first))) == _FIRST_PIECES
        self._newline_id = len(_FIRST_PIECES) - 1
        self._prefixes_lines = self.by_line and processor.EncodeAsIds("a") != processor.EncodeAsIds("\na")[1:]
        self._line_end_ids: list[int] = processor.EncodeAsIds(NEWLINE)
        """Of a text that is one line end: after the ids of the dummy prefix."""
        self._decode_ids = processor.DecodeIds

    def limit(self, model: ModelFile) -> int:
        """As many characters of a text as may be encoded at once without changing its ids; 0: only single lines.

        For a unigram no segmentation that matters scores worse than one piece per character, each at worst unknown. So
        a run of n characters has a total of at most n · (|lowest score| + penalty), and up to `_EXACT_TOTAL` sums of
        multiples of `SCORE_STEP` keep their order. The score of "\\n" is no such multiple, but it is in every path, and
        so shifts all of them equally. BPE adds nothing up.
        """
        texts = [piece.text for piece in model.pieces if piece.type in (PieceType.NORMAL, PieceType.USER_DEFINED)]
        crosses_lines = any(NEWLINE in text and text != NEWLINE for text in texts)
        if not self.by_line:
            changes_text = model.charsmap or model.remove_extra_whitespaces or model.whitespace_as_suffix
            is_one_id = len(self._line_end_ids) == (2 if model.add_dummy_prefix else 1)
            return (
                UNSPLIT if not model.is_bpe or changes_text or crosses_lines or not is_one_id else _BPE_RUN_CHARACTERS
            )
        if model.normalization != "identity" or model.add_dummy_prefix or crosses_lines:
            return 0
        if model.is_bpe:
            return _BPE_RUN_CHARACTERS
        scores = np.array([piece.score for piece in model.pieces if piece.type is PieceType.NORMAL] or [1.0])
        has_symbols = len(texts) > len(scores) + 1
        if not model.is_unigram or has_symbols or (scores > 0).any() or np.modf(scores / SCORE_STEP)[0].any():
            return 0
        return int(_EXACT_TOTAL / (UNKNOWN_PENALTY - scores.min()))

    def runs(self, text: str, limit: int) -> list[str]:
        """Split at line ends into runs of up to `limit` characters; a longer line is a run by itself.

        The line ends between runs of lines are left out; the later runs of a document begin with theirs.
        """
        if not limit:
            return text.split(NEWLINE)
        runs, start = [], 0
        while len(text) - start > limit:
            first = start if self.by_line else start + 1  # the line end with which a run begins does not end it
            end = text.rfind(NEWLINE, first, start + limit + 1)
            end = text.find(NEWLINE, first + limit) if end < 0 else end
            if end < 0:
                break
            runs.append(text[start:end])
            start = end + self.by_line
        return [*runs, text[start:]]

    def join(self, ids: Sequence[Any]) -> Any:
        """Join the buffers of int32 ids that SentencePiece gave for the runs of a text."""
        if len(ids) == 1:
            return ids[0]
        if self.by_line:
            return np.int32(self._newline_id).tobytes().join(ids)
        prefix = len(self._line_end_ids) - 1
        return b"".join((ids[0], *(np.frombuffer(each, dtype=np.int32)[prefix:].tobytes() for each in ids[1:])))

    def decode(self, ids: list[int]) -> str:
        """Decode by lines where each has a dummy prefix: SentencePiece removes it only from the start of a text."""
        if not self._prefixes_lines:
            return self._decode_ids(ids)
        lines: list[list[int]] = [[]]
        for i in ids:
            if i == self._newline_id:
                lines.append([])
            else:
                lines[-1].append(i)
        return NEWLINE.join(map(self._decode_ids, lines))
