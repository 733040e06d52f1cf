"""SentencePiece's and Hugging Face's tokenizers behind one interface, so that all are measured alike.

In: a SentencePiece `.model` file, a Hugging Face `tokenizer.json`, or a folder or downloaded repository that holds one.
Out: a `MeasuredTokenizer` that encodes lines, decodes ids, tells which characters of a line each token stands for, and
knows what kind of token every id is. Nothing is added to a text: no <s>, no [CLS], no padding; text that spells a
special token is text.

Byte tokens are byte-fallback pieces (<0xE3>), and in byte-level BPE (GPT-2's kind, whose vocabulary spells bytes in a
table of 256 characters) all tokens whose bytes are no whole characters.

Source: sentencepiece 0.2.3; the format of tokenizers 0.23's `tokenizer.json`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import sentencepiece
from tokenizers import Tokenizer

from zerokara.errors import Fault, UserError
from zerokara.tokenizer.encoder import SPACE_MARK, Ids
from zerokara.tokenizer.model_file import ModelFile

HUB_PREFIX = "hf://"
IN_FOLDER = ("tokenizer.json", "tokenizer.model", "spiece.model")
"""Files that a folder may hold, in order of preference."""
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PROBE = "a 1 龘 \U0001f600"
"""Text on which a tokenizer that cannot encode (a WordPiece without its unknown token) fails."""


class TokenKind(IntEnum):
    """What a token stands for."""

    PIECE = 0
    """Several characters."""
    CHARACTER = 1
    """One whole character."""
    BYTE = 2
    """A part of a character."""
    UNKNOWN = 3
    """Text that the tokenizer cannot represent."""


class Span(NamedTuple):
    """A token and the characters of the line that it stands for; may be empty for all but one byte of a character."""

    id: int
    start: int
    end: int


class MeasuredTokenizer(ABC):
    """A tokenizer to measure. Ids are below `len(pieces)`."""

    description: str
    """The kind of tokenizer, to be read."""
    vocab_size: int
    """Number of pieces, special ones included."""
    pieces: list[str]
    """By id, as they are in the vocabulary."""
    kinds: npt.NDArray[np.int8]
    """By id."""
    piece_characters: npt.NDArray[np.int32]
    """By id: characters of the piece's text; 0 for bytes, the unknown token and control pieces."""
    piece_bytes: npt.NDArray[np.int32]
    """By id: UTF-8 bytes of that text; for byte tokens their number of bytes."""

    @abstractmethod
    def encode(self, lines: list[str]) -> list[Ids]:
        """The ids of each line."""

    @abstractmethod
    def decode(self, ids: list[Ids]) -> list[str]:
        """The text of each list of ids."""

    @abstractmethod
    def spans(self, line: str) -> list[Span]:
        """The tokens of a line with their positions."""

    def unknown_characters(self, line: str) -> int:
        """Characters of a line that are under unknown tokens."""
        covered: set[int] = set()
        for span in self.spans(line):
            if self.kinds[span.id] == TokenKind.UNKNOWN:
                covered.update(range(span.start, span.end))
        return len(covered)

    def _describe(self, pieces: list[str], contents: Sequence[bytes | None], unknown: set[int]) -> None:
        """Set the attributes by id; a content is the text of a piece as bytes, bytes that are no text, or None."""
        self.pieces = pieces
        self.kinds = np.full(len(pieces), TokenKind.PIECE, dtype=np.int8)
        self.piece_characters = np.zeros(len(pieces), dtype=np.int32)
        self.piece_bytes = np.zeros(len(pieces), dtype=np.int32)
        for i, content in enumerate(contents):
            if i in unknown:
                self.kinds[i] = TokenKind.UNKNOWN
            elif content:
                self.piece_bytes[i] = len(content)
                characters = _num_characters(content)
                self.piece_characters[i] = characters
                self.kinds[i] = (
                    TokenKind.BYTE if characters == 0 else TokenKind.CHARACTER if characters == 1 else TokenKind.PIECE
                )


class SentencePieceTokenizer(MeasuredTokenizer):
    """A SentencePiece model of any kind, also one that training could not use."""

    def __init__(self, content: bytes) -> None:
        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(content)
        model = ModelFile(content)
        kind = "unigram" if model.is_unigram else "BPE" if model.is_bpe else "word or character"
        self.description = f"SentencePiece {kind}" + (", byte fallback" if model.byte_fallback else "")
        self.vocab_size = self._processor.GetPieceSize()
        ids = range(self.vocab_size)
        self._describe(
            [str(self._processor.IdToPiece(i)) for i in ids],
            [self._content(i) for i in ids],
            {i for i in ids if self._processor.IsUnknown(i)},
        )

    def _content(self, i: int) -> bytes | None:
        piece = str(self._processor.IdToPiece(i))
        if self._processor.IsByte(i):
            return bytes([0x80])  # any byte that is no character by itself
        return None if self._processor.IsControl(i) else piece.replace(SPACE_MARK, " ").encode()

    def encode(self, lines: list[str]) -> list[Ids]:
        """The ids of each line."""
        return list(self._processor.EncodeAsNumpy(lines, num_threads=1))

    def decode(self, ids: list[Ids]) -> list[str]:
        """The text of each list of ids."""
        return list(self._processor.Decode([line.tolist() for line in ids], num_threads=1))

    def spans(self, line: str) -> list[Span]:
        """The tokens of a line with their positions."""
        made = self._processor.EncodeAsOffsetMapping(line)
        return [Span(i, start, end) for i, (start, end) in zip(made["ids"], made["offsets"], strict=True)]


class HuggingFaceTokenizer(MeasuredTokenizer):
    """The contents of a `tokenizer.json`: BPE, byte-level BPE, Unigram, WordPiece or whole words."""

    def __init__(self, content: bytes) -> None:
        settings = orjson.loads(content)
        # Nothing is to be added or truncated; the last would also change offsets (`trim_offsets`).
        settings.update(truncation=None, padding=None, post_processor=None)
        self._vendor = Tokenizer.from_str(orjson.dumps(settings).decode())
        self._vendor.encode_special_tokens = True  # text that spells a special token is text
        self._vendor.encode(_PROBE, add_special_tokens=False)
        parts = {part["type"]: part for part in _parts(settings)}
        model = settings["model"]
        over_bytes = "ByteLevel" in parts
        self.description = f"Hugging Face {model.get('type', 'tokenizer')}" + (", byte-level" if over_bytes else "")
        self.description += ", byte fallback" if model.get("byte_fallback") else ""
        vocabulary = self._vendor.get_vocab(with_added_tokens=True)
        self.vocab_size = len(vocabulary)
        pieces = [""] * (max(vocabulary.values(), default=-1) + 1)
        for piece, i in vocabulary.items():
            pieces[i] = piece
        spelling = _Spelling(model, parts, over_bytes)
        added = {token["id"]: token for token in settings.get("added_tokens") or []}
        contents = [
            (None if added[i]["special"] else piece.encode()) if i in added else spelling.content(piece)
            for i, piece in enumerate(pieces)
        ]
        self._describe(pieces, contents, _unknown_ids(model, vocabulary))

    def encode(self, lines: list[str]) -> list[Ids]:
        """The ids of each line."""
        made = self._vendor.encode_batch_fast(lines, add_special_tokens=False)
        return [np.array(line.ids, dtype=np.int32) for line in made]

    def decode(self, ids: list[Ids]) -> list[str]:
        """The text of each list of ids."""
        return list(self._vendor.decode_batch([line.tolist() for line in ids], skip_special_tokens=False))

    def spans(self, line: str) -> list[Span]:
        """The tokens of a line with their positions."""
        made = self._vendor.encode(line, add_special_tokens=False)
        return [Span(i, start, end) for i, (start, end) in zip(made.ids, made.offsets, strict=True)]


class _Spelling:
    """How the pieces of a `tokenizer.json` spell text."""

    def __init__(self, model: dict[str, Any], parts: dict[str, dict[str, Any]], over_bytes: bool) -> None:
        self._bytes = _byte_table() if over_bytes else None
        self._falls_back = bool(model.get("byte_fallback"))
        self._space = parts.get("Metaspace", {}).get("replacement", SPACE_MARK)
        self._prefix = model.get("continuing_subword_prefix") or ""
        self._suffix = model.get("end_of_word_suffix") or ""

    def content(self, piece: str) -> bytes:
        """The bytes of the text that a piece stands for."""
        if self._bytes is not None and all(character in self._bytes for character in piece):
            return bytes(self._bytes[character] for character in piece)
        if self._falls_back and _BYTE_PIECE.fullmatch(piece):
            return bytes([0x80])
        text = piece.removeprefix(self._prefix).removesuffix(self._suffix)
        return text.replace(self._space, " ").encode()


def find_file(name: str) -> Path:
    """The file of a tokenizer to compare with: `name` itself, or the one in that folder or downloaded repository.

    Raises:
        UserError: there is none.
    """
    if name.startswith(HUB_PREFIX):
        from huggingface_hub import try_to_load_from_cache  # a second to import

        repository = name.removeprefix(HUB_PREFIX)
        with suppress(ValueError):  # no name of a repository
            for inside in IN_FOLDER:
                if isinstance(cached := try_to_load_from_cache(repository, inside), str):
                    return Path(cached)
        rule = "is not on this machine, and step 1 downloads no tokenizer"
        raise UserError(Fault(name, rule, remedy=f"run `hf download {repository} tokenizer.json` first"))
    path = Path(name)
    if not path.is_dir():
        return path
    for inside in IN_FOLDER:
        if (path / inside).is_file():
            return path / inside
    remedy = "name a folder that does, or the file itself"
    raise UserError(Fault(name, f"the folder holds no {' and no '.join(IN_FOLDER)}", remedy=remedy))


def open_tokenizer(name: str | Path) -> MeasuredTokenizer:
    """Open a tokenizer of any kind.

    Raises:
        UserError: it cannot be opened.
    """
    path = find_file(str(name))
    if path.suffix != ".json":
        try:
            return SentencePieceTokenizer(path.read_bytes())
        except (OSError, RuntimeError) as error:
            raise UserError(Fault(str(name), f"is not a SentencePiece model that can be opened ({error})")) from error
    try:
        return HuggingFaceTokenizer(path.read_bytes())
    except Exception as error:  # the vendor raises nothing narrower
        rule = f"is not a Hugging Face tokenizer.json that can be opened ({error})"
        raise UserError(Fault(str(name), rule)) from error


def _parts(settings: object) -> Iterator[dict[str, Any]]:
    """Every part of a `tokenizer.json` that has a type, save the tokens and the model's vocabulary."""
    if isinstance(settings, dict):
        if isinstance(settings.get("type"), str):
            yield settings
        for key, value in settings.items():
            if key not in ("added_tokens", "vocab", "merges"):
                yield from _parts(value)
    elif isinstance(settings, list):
        for value in settings:
            yield from _parts(value)


def _unknown_ids(model: dict[str, Any], vocabulary: dict[str, int]) -> set[int]:
    """The id of the unknown token: Unigram names it by id, the others by text, and byte-level BPE has none."""
    token = model.get("unk_token")
    found = {model.get("unk_id"), None if token is None else vocabulary.get(token)}
    return {i for i in found if i is not None}


def _byte_table() -> dict[str, int]:
    """The characters with which GPT-2's vocabulary spells bytes (`bytes_to_unicode`, gpt-2/src/encoder.py).

    Printable bytes are themselves; the others, in their order, are the characters from U+0100 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _num_characters(content: bytes) -> int:
    """The number of characters, or 0 where the bytes are no whole characters."""
    try:
        return len(content.decode())
    except UnicodeDecodeError:
        return 0
