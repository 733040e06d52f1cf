"""A Hugging Face tokenizer (`tokenizer.json`) as an `Encoder`, with the token that ends documents from its folder.

The ids of a document are those of tokenizers (0.23) for its whole text, without what a post-processor would add. Text
that spells a special token is text; other added tokens are found in it, as in the model's own training. The files
beside `tokenizer.json` name special tokens, and go with the run and its export, byte by byte.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import Tokenizer

from zerokara.base.errors import Fault, UserError, nearest, refuse, shown
from zerokara.base.manifest import FileRecord, Inputs, file_key
from zerokara.tokenizer import CONFIG_NAME, ENDS_NAMES, JSON_NAME, KEPT_NAMES
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.model_file import SPACE_MARK

if TYPE_CHECKING:  # the tokenizer of an export needs neither
    from zerokara.config.data import DataSettings
    from zerokara.config.pretrain_config import RunConfig

CARRIED = (*KEPT_NAMES, "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt")
"""Files of a tokenizer, which an export holds as they were."""
IN_FOLDER = ("sentencepiece.model", "tokenizer.model", "spiece.model", JSON_NAME)
"""Tokenizers that a folder may hold, in order of preference: SentencePiece models (ours, Llama's, T5's) come first."""
RUN_FOLDER = "tokenizer"
"""Folder within a run folder that keeps the files; a SentencePiece model is one file there."""
_NAMING = (CONFIG_NAME, "special_tokens_map.json", *ENDS_NAMES)
"""Files that name special tokens, as ``eos_token`` or by ``eos_token_id``."""
ANOTHER_MODEL = "put the model's own tokenizer there; if this is, resize the model (model.resize_token_embeddings)"
"""Remedy for `of_another_model`."""
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
FIRST_END = ""
"""Stands for the first of several ends of a document, where it does not matter which; no setting can be it."""
_PRINTING = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTING]
BYTES = {chr(byte): byte for byte in _PRINTING} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}
"""The characters with which GPT-2's vocabulary spells bytes (`bytes_to_unicode`, gpt-2/src/encoder.py): printable bytes
are themselves; the others, in their order, are the characters from U+0100 on."""


class HuggingFaceEncoder(Encoder):
    """A `tokenizer.json` in the place of a SentencePiece model; nothing is added to a text or cut from it.

    `end_of_document` is the token that ends documents; `auto` is the only one that the files beside it name as eos.

    Raises:
        UserError: the file cannot be opened, leaves out merges at random, or needs code.
    """

    library = "tokenizers"
    by_line = adds_sentinels = False

    def __init__(self, path: str | Path, end_of_document: str = "auto", files: dict[str, bytes] | None = None) -> None:
        """`files` are `folder_files`, where they have been read already."""
        self.model_path, self._end_of_document = Path(path), end_of_document
        self.folder_files = files or folder_files(self.model_path)
        where, again = str(self.model_path), "name a tokenizer.json, a folder with one, or a SentencePiece model"
        self.run_files = {f"{RUN_FOLDER}/{name}": content for name, content in self.folder_files.items()}
        self.model_bytes = self.folder_files[JSON_NAME]
        try:
            self._open()
            self._naming = {name: orjson.loads(self.folder_files.get(name, b"{}")) for name in _NAMING}
        except Exception as error:  # tokenizers raises nothing narrower
            rule = f"is not a Hugging Face tokenizer.json that can be opened, or a file beside it is damaged ({error})"
            raise UserError(Fault(where, rule, remedy="download it again")) from error
        check_dropout(self.model_path, self._dropout)
        if self._naming[CONFIG_NAME].get("auto_map"):
            rule = "needs Python code of its folder (auto_map in tokenizer_config.json), which is not run"
            raise UserError(Fault(where, rule, remedy=again))
        self.faults: list[Fault] = []
        """The end of a document is unknown, or one of several; then `eos_id` is -1."""
        self.eos_id = self._end_id(where)
        self.start_id = -1 if self.start_id == self.eos_id else self.start_id  # the end of the previous document serves
        self.bos_id = min(self.named("bos"), default=-1)
        pads = [*self.named("pad"), *({self.unk_id} - {-1})]
        self.pad_id = next((i for i in pads if i != self.eos_id), self.eos_id)
        """<unk> where the files name none but the end, and that where there is no <unk>."""

    def _open(self) -> None:
        """Open the file; raises whatever tokenizers raises."""
        self.settings: dict[str, Any] = orjson.loads(self.model_bytes)
        self.settings.update(truncation=None, padding=None)
        self.algorithm: dict[str, Any] = self.settings["model"]
        """The vocabulary, the merges and their options."""
        self._dropout, self.algorithm["dropout"] = self.algorithm.get("dropout"), None
        self.vendor = Tokenizer.from_str(orjson.dumps(self.settings).decode())
        first = self.vendor.encode("a")
        self.start_id = first.ids[0] if first.special_tokens_mask[:1] == [1] else -1
        # A post-processor would also change offsets (`trim_offsets`).
        self.vendor.post_processor = self.settings["post_processor"] = None
        self.vendor.encode_special_tokens = True
        self.vendor.encode("a 1 龘 \U0001f600", add_special_tokens=False)  # a WordPiece may lack its unknown token
        self.parts: dict[str, dict[str, Any]] = {}
        """The parts around the algorithm, by type."""
        for key in ("normalizer", "pre_tokenizer", "decoder"):
            part = self.settings.get(key) or {}
            several = part.get(f"{key.replace('_', '')}s", [part])  # a Sequence has this key
            self.parts |= {each["type"]: each for each in several if each}
        self.added: list[dict[str, Any]] = self.settings.get("added_tokens") or []
        vocabulary = self.vendor.get_vocab(with_added_tokens=True)
        self.pieces = [""] * (max(vocabulary.values(), default=-1) + 1)
        """Pieces by id; empty for an id that is none."""
        for piece, i in vocabulary.items():
            self.pieces[i] = piece
        self.vocab_size = len(self.pieces)
        # Unigram names its unknown token by id, the others by text, and byte-level BPE has none.
        named = (self.algorithm.get("unk_id"), vocabulary.get(self.algorithm.get("unk_token")))
        self.unk_id = next((i for i in named if i is not None), -1)

    def named(self, name: str, files: Sequence[str] = _NAMING) -> dict[int, str]:
        """Ids of the special tokens of this name (``eos``), each with the first of the files that names it."""
        found = dict[int, str]()
        for file, content in ((file, self._naming[file]) for file in files):
            token, ids = content.get(f"{name}_token"), content.get(f"{name}_token_id")
            token = token.get("content") if isinstance(token, dict) else token
            ids = ids if isinstance(ids, list) else [ids]
            for i in (self.vendor.token_to_id(token or ""), *ids):
                if isinstance(i, int) and 0 <= i < self.vocab_size:
                    found.setdefault(i, file)
        return found

    def _end_id(self, where: str) -> int:
        """Id of the end of a document; a fault where it is not certain."""
        named, choice = self.named("eos"), self._end_of_document
        record = read_json(self.model_path.with_name("manifest.json"))
        if record.get("step") == "convert":  # our export: its config.json has the end of the run
            named = self.named("eos", ENDS_NAMES[1:]) or named
        ids = [*named] if choice == "auto" else [self.vendor.token_to_id(choice)]
        ids = [*named][:1] if choice == FIRST_END else ids
        several = ", ".join(f"{self.pieces[i]} ({file})" for i, file in named.items())
        one, rule = ids[0] if len(ids) == 1 else None, ""
        if choice in ("auto", FIRST_END) and one is None:
            rule = f"is not certain: {where} may end a document by {several}"
            rule = rule if named else f"is not known: no file beside {where} names one (eos_token)"
        elif one is None:
            rule = f"is no token of {where}"
        elif one in self.vendor.encode(self.pieces[one], add_special_tokens=False).ids:
            rule = f"must be a special token: {self.pieces[one]} in a text would end its document"
        if one is None or rule:
            examples = several or ", ".join(self.pieces[i] for i in sorted(self.control_ids)[:8]) or "none there"
            remedy = f"set it to the one that ended documents in the model's pretraining: {examples}"
            self.faults.append(Fault(where, rule, "end_of_document", choice, remedy))
            return -1
        return int(one)

    @cached_property
    def sha256(self) -> str:
        """Hash of tokenizer.json and of the end of a document, which identify the tokenizer of token files and runs."""
        return hashlib.sha256(self.model_bytes + b"\0" + self.pieces[self.eos_id].encode()).hexdigest()

    @property
    def record(self) -> Inputs:
        path, size, modified_ns = file_key(self.model_path)
        return [FileRecord(path, size, self.sha256, modified_ns)]

    @cached_property
    def token_texts(self) -> list[bytes]:
        texts = [self._spelt_by(piece) for piece in self.pieces]
        for token in self.added:
            texts[token["id"]] = b"" if token["special"] else self.pieces[token["id"]].encode()
        if self.unk_id >= 0:
            texts[self.unk_id] = b""
        return texts

    def _spelt_by(self, piece: str) -> bytes:
        if "ByteLevel" in self.parts and all(character in BYTES for character in piece):
            return bytes(BYTES[character] for character in piece)
        if self.algorithm.get("byte_fallback") and _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        text = piece.removeprefix(self.algorithm.get("continuing_subword_prefix") or "")
        text = text.removesuffix(self.algorithm.get("end_of_word_suffix") or "")
        return text.replace(self.parts.get("Metaspace", {}).get("replacement", SPACE_MARK), " ").encode()

    @property
    def learnt_ids(self) -> list[int]:
        added = {token["id"] for token in self.added}
        return [i for i, piece in enumerate(self.pieces) if len(piece) > 1 and i not in added]

    def spans(self, line: str) -> list[tuple[int, int, int]]:
        encoding = self.vendor.encode(line, add_special_tokens=False)
        return [(i, *offsets) for i, offsets in zip(encoding.ids, encoding.offsets, strict=True)]

    @property
    def description(self) -> str:
        byte_level = ", byte-level" if "ByteLevel" in self.parts else ""
        fallback = ", byte fallback" if self.algorithm.get("byte_fallback") else ""
        return f"Hugging Face {self.algorithm.get('type', 'tokenizer')}{byte_level}{fallback}"

    @cached_property
    def control_ids(self) -> frozenset[int]:
        return frozenset(token["id"] for token in self.added if token["special"]) - {self.unk_id}

    @property
    def symbols(self) -> list[str]:
        return [token["content"] for token in self.added if not token["special"]]

    def _id_bytes(self, texts: Iterable[str]) -> Iterator[bytes]:
        for encoding in self.vendor.encode_batch_fast(list(texts), add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.int32).tobytes()

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return str(self.vendor.decode([int(i) for i in ids], skip_special_tokens=True))

    def renamed(self, names: dict[int, str]) -> bytes:
        """Return tokenizer.json with other names of special tokens, by id."""
        settings, model = self.settings, self.algorithm
        added = [token | {"content": names.get(token["id"], token["content"])} for token in self.added]
        vocabulary = {names.get(i, piece): i for piece, i in model["vocab"].items()}
        return orjson.dumps(settings | {"added_tokens": added, "model": model | {"vocab": vocabulary}})

    def __reduce__(self) -> tuple[Any, ...]:
        return HuggingFaceEncoder, (self.model_path, self._end_of_document, self.folder_files)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, empty where there is no such file; another content is a UserError."""
    try:
        return dict(orjson.loads(path.read_bytes())) if path.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        rule = f"cannot be read as a JSON object: {error}"
        raise UserError(Fault(str(path), rule, remedy="download the folder again")) from error


def of_another_model(pieces: int, rows: int) -> str:
    """Return a rule if a model has many more rows than its tokenizer has pieces; empty if they may be padding.

    Padding are 28 rows of 32,128 (T5), 267 of 151,936 (Qwen 3), 905 of 51,200 (Phi-2).
    """
    is_padding = rows - pieces <= 128 + rows // 50
    return "" if is_padding else f"has {pieces:,} pieces, and the model beside it {rows:,} rows: is another model's"


def check_dropout(path: Path, dropout: float | None) -> None:
    """Raise a `UserError` if a tokenizer leaves out merges at random, so that no two encodings have the same ids."""
    if dropout:
        rule = f"leaves out merges at random (model.dropout = {dropout:.6g}), so that a text has other ids each time"
        raise UserError(Fault(str(path), rule, remedy=f'set "dropout" to null in a copy of {path}'))


def folder_files(path: Path) -> dict[str, bytes]:
    """Return the contents of a tokenizer.json and of the files that belong to it, by their names in its folder."""
    names = {JSON_NAME: path}
    if path.name == JSON_NAME:  # of another name, it does not belong to the files beside it
        names = {name: path.with_name(name) for name in (*CARRIED, *_NAMING)}
    return {name: each.read_bytes() for name, each in names.items() if each.is_file()}


def encoder_of(config: "DataSettings | RunConfig") -> Encoder:
    """Open the tokenizer of a configuration, as `open_encoder` does; faults name its setting."""
    try:
        return open_encoder(config.input_tokenizer_file, config.end_of_document)
    except UserError as error:
        key = "input_tokenizer_file"
        raise UserError([config.fault(each.key or key, each.rule, each.remedy) for each in error.faults]) from error


def open_encoder(name: str | Path, end_of_document: str = "auto") -> Encoder:
    """Open a tokenizer of either kind: a SentencePiece model, a `tokenizer.json`, or a folder with one.

    Raises:
        UserError: it cannot be opened, or its end of a document is not certain (with the key `end_of_document`).
    """
    path = tokenizer_file(Path(name))
    encoder = open_file(path, end_of_document)
    refuse(encoder.faults)
    rows = read_json(path.with_name(ENDS_NAMES[1])).get("vocab_size") if path.name in IN_FOLDER else None
    if rule := of_another_model(encoder.vocab_size, rows or 0):
        raise UserError(Fault(str(path), rule, remedy=ANOTHER_MODEL))
    if path.suffix != ".json" and end_of_document not in ("auto", FIRST_END, encoder.pieces[encoder.eos_id]):
        rule = f"must be auto with a SentencePiece model, whose end is {encoder.pieces[encoder.eos_id]}"
        raise UserError(Fault(str(path), rule, "end_of_document", end_of_document, "set it to auto"))
    return encoder


def open_file(path: Path, end_of_document: str = "auto") -> Encoder:
    """Open a tokenizer's file, also one that a model cannot be trained with (`Encoder.faults`)."""
    return HuggingFaceEncoder(path, end_of_document) if path.suffix == ".json" else Encoder(path)


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer of a folder, or the file itself; where there is none it is a UserError."""
    if not path.exists():
        remedy = nearest(path, "make one with step 1, and name its tokenizer.model")
        raise UserError(Fault(shown(path), "there is no such tokenizer file", remedy=remedy))
    if not path.is_dir():
        return path
    if found := next((path / name for name in IN_FOLDER if (path / name).is_file()), None):
        return found
    code = ", ".join(sorted(each.name for each in path.glob("*.py"))[:3])
    rule = f"the folder holds none of {', '.join(IN_FOLDER)}"
    rule += f"; its Python code ({code}) is not run" if code else ""
    raise UserError(Fault(shown(str(path)), rule, remedy="name a tokenizer file, or a folder with one"))
