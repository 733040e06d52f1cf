"""SentencePiece's and Hugging Face's tokenizers behind one interface, so that all are measured alike.

In: a SentencePiece `.model` file, a Hugging Face `tokenizer.json` (format of tokenizers 0.23), or a folder or
downloaded repository that holds one. Out: a `MeasuredTokenizer`. Nothing is added to a text, and text that spells a
special token is text. Each vendor's own library encodes: tokenizers would take two to four times as long for a
SentencePiece model, and not every one has an equal `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import sentencepiece

from zerokara.errors import Fault, UserError
from zerokara.tokenizer.encoder import Ids
from zerokara.tokenizer.hugging_face import IN_FOLDER, PART_OF_CHARACTER, TokenizerJson, tokenizer_file
from zerokara.tokenizer.model_file import SPACE_MARK, ModelFile, PieceType

HUB_PREFIX = "hf://"

TokenKind = IntEnum("TokenKind", ("PIECE", "CHARACTER", "BYTE", "UNKNOWN"), start=0)
"""Kind of a token: several characters, one whole character, a part of one (a byte-fallback piece such as <0xE3>; in
byte-level BPE any token whose bytes are no whole characters), text without a piece."""


@dataclass
class MeasuredTokenizer:
    """A tokenizer to measure, with arrays by id.

    It encodes lines, decodes the ids of each, and gives the *spans* of a line: each token with start and end of the
    characters that it stands for, which may be none for all but one byte of a character. Ids may leave gaps; contents
    are the bytes that each piece stands for, None for unknown tokens and control pieces. Learnt are the ids of pieces
    that a training found: not those of control pieces, single bytes and a user's symbols.
    """

    description: str
    vocab_size: int
    pieces: list[str]
    learnt: list[int]
    contents: list[bytes | None]
    unknown_ids: set[int]
    encode: Callable[[list[str]], list[Ids]]
    decode: Callable[[list[Ids]], list[str]]
    spans: Callable[[str], list[tuple[int, int, int]]]

    def __post_init__(self) -> None:
        contents = [content or b"" for content in self.contents]
        texts = [content.decode(errors="ignore") for content in contents]
        self.piece_bytes = np.array([len(content) for content in contents])
        """UTF-8 bytes of the piece's text; for byte tokens their number of bytes."""
        is_text = [text.encode() == content for text, content in zip(texts, contents, strict=True)]
        self.piece_characters = np.array([len(text) for text in texts]) * is_text
        """Characters of the piece's text; 0 for bytes, the unknown token and control pieces."""
        self.kinds = np.where(self.piece_characters == 1, TokenKind.CHARACTER, TokenKind.PIECE)
        self.kinds[(self.piece_characters == 0) & (self.piece_bytes > 0)] = TokenKind.BYTE
        self.kinds[list(self.unknown_ids)] = TokenKind.UNKNOWN


def find_file(name: str) -> Path:
    """Return the file of a tokenizer: `name` itself, or the one in that folder or downloaded repository.

    Raises:
        UserError: there is none.
    """
    if not name.startswith(HUB_PREFIX):
        return tokenizer_file(Path(name))
    from huggingface_hub import try_to_load_from_cache  # a second to import

    repository = name.removeprefix(HUB_PREFIX)
    with suppress(ValueError):  # no name of a repository
        for inside in IN_FOLDER:
            if isinstance(cached := try_to_load_from_cache(repository, inside), str):
                return Path(cached)
    rule = "is not on this machine, and step 1 downloads no tokenizer"
    raise UserError(Fault(name, rule, remedy=f"run `hf download {repository} tokenizer.json` first"))


def open_tokenizer(name: str | Path) -> MeasuredTokenizer:
    """Open a tokenizer of any kind; raise a `UserError` where it cannot be opened."""
    path = find_file(str(name))
    is_json = path.suffix == ".json"
    try:
        return _hugging_face(path.read_bytes()) if is_json else _sentencepiece(path.read_bytes())
    except Exception as error:  # tokenizers raises nothing narrower
        kind = "Hugging Face tokenizer.json" if is_json else "SentencePiece model"
        raise UserError(Fault(str(name), f"is not a {kind} that can be opened ({error})")) from error


def _sentencepiece(content: bytes) -> MeasuredTokenizer:
    """Open a SentencePiece model of any kind, also one that training could not use."""
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(content)
    model = ModelFile(content)
    kind = "unigram" if model.is_unigram else "BPE" if model.is_bpe else "word or character"
    without_text = dict.fromkeys((PieceType.CONTROL, PieceType.UNKNOWN)) | {PieceType.BYTE: PART_OF_CHARACTER}

    def spans(line: str) -> list[tuple[int, int, int]]:
        made = processor.EncodeAsOffsetMapping(line)
        return [(i, *offsets) for i, offsets in zip(made["ids"], made["offsets"], strict=True)]

    return MeasuredTokenizer(
        description=f"SentencePiece {kind}" + (", byte fallback" if model.byte_fallback else ""),
        vocab_size=len(model.pieces),
        pieces=[piece.text for piece in model.pieces],
        learnt=[i for i, piece in enumerate(model.pieces) if piece.type is PieceType.NORMAL],
        contents=[without_text.get(piece.type, piece.text.replace(SPACE_MARK, " ").encode()) for piece in model.pieces],
        unknown_ids={i for i, piece in enumerate(model.pieces) if piece.type is PieceType.UNKNOWN},
        encode=lambda lines: list(processor.EncodeAsNumpy(lines, num_threads=1)),
        decode=lambda ids: list(processor.Decode([line.tolist() for line in ids], num_threads=1)),
        spans=spans,
    )


def _hugging_face(content: bytes) -> MeasuredTokenizer:
    """Open a `tokenizer.json`: BPE, byte-level BPE, Unigram, WordPiece or whole words."""
    opened = TokenizerJson(content)
    vendor, model = opened.vendor, opened.model
    added = {token["id"] for token in opened.added}
    description = f"Hugging Face {model.get('type', 'tokenizer')}"
    description += ", byte-level" if "ByteLevel" in opened.parts else ""

    pieces = opened.pieces
    if "ByteLevel" in opened.parts:
        pieces = [_shown(content, piece) for content, piece in zip(opened.contents, pieces, strict=True)]

    def spans(line: str) -> list[tuple[int, int, int]]:
        encoding = vendor.encode(line, add_special_tokens=False)
        return [(i, *offsets) for i, offsets in zip(encoding.ids, encoding.offsets, strict=True)]

    return MeasuredTokenizer(
        description=description + (", byte fallback" if model.get("byte_fallback") else ""),
        vocab_size=opened.num_pieces,
        pieces=pieces,
        learnt=[i for i, piece in enumerate(opened.pieces) if len(piece) > 1 and i not in added],
        contents=opened.contents,
        unknown_ids=opened.unknown_ids,
        encode=lambda lines: [
            np.array(each.ids, dtype=np.int32) for each in vendor.encode_batch_fast(lines, add_special_tokens=False)
        ],
        decode=lambda ids: list(vendor.decode_batch([line.tolist() for line in ids], skip_special_tokens=False)),
        spans=spans,
    )


def _shown(content: bytes | None, piece: str) -> str:
    """Spell a piece of byte-level BPE as the text that it is, where it is whole characters."""
    text = (content or b"").decode(errors="replace")
    return piece if "\ufffd" in text or not text else text.replace(" ", SPACE_MARK)
