"""The encoder of step 2: gigatoken for BPE where it provably gives the ids of the tokenizer's own library, else that.

In: the encoder that training uses, and some of the corpus. Out: an `EncoderChoice`, whose encoder can be pickled.
gigatoken (0.10.0, which Megatron-LM uses too) caches what it has segmented before: one core encodes 80 MB/s of English
where SentencePiece encodes 6, and 40 of Japanese where it encodes 24. For unigram nothing was faster everywhere:
splintr 0.22 needs 0.6 to 1.1 times the time, kitoken 0.11.1 is slower and gives other ids on every third document,
gigatoken does not support it. What the proof rests on (`unproved` and `FastEncoder` exclude the rest):

- *Merges.* All merge the best pair first, then the leftmost. SentencePiece ranks a pair by the text that it makes,
  gigatoken among the pairs of one text too. But wherever a text is made, it is made of one pair: the merges inside of
  it were the same, in the same order, since nothing reached across its ends. So ranks within a text never decide.
- *Characters.* SentencePiece knows none by their kind. A pattern of tokenizers does: it and gigatoken know different
  versions of Unicode (16 and 17), and agree on what this Python's assigns, which the tests try for every code point.
- *Normalisation.* A text in NFC by this Python is so by every version of Unicode; others are not given to gigatoken.
- *Added tokens.* A text that holds one is not given to it.

On the hard texts and a sample of the corpus they are compared all the same.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np

from zerokara.tokenizer.compatibility import hard_texts
from zerokara.tokenizer.encoder import Encoder, Ids, Joined
from zerokara.tokenizer.hugging_face import BYTES, HuggingFaceEncoder
from zerokara.tokenizer.model_file import NEWLINE, SPACE_MARK, ModelFile, PieceType

MAX_CACHED_TOKENS = 8_000_000
"""Tokens (some 40 MB of text) after which gigatoken is reopened: its cache, by then some 100 MB, has no limit. Four
times as many for a vocabulary of 150,000 pieces, with which it takes a second to open."""

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = ("", f"{_LETTERS}{{1,3}}{_OTHERS}", f"{_LETTERS}{_OTHERS}")
"""Patterns of pre-tokenizers that are tested: that of GPT-2 (ByteLevel's own), of Llama 3, and of Qwen 2 and 3."""


class FastEncoder:
    """gigatoken in the place of `Encoder`, for step 2."""

    def __init__(self, reference: Encoder) -> None:
        self._reference = reference
        self.model_path, self.sha256 = reference.model_path, reference.sha256
        self.vocab_size, self.unk_id = reference.vocab_size, reference.unk_id
        self.eos_id, self.start_id = reference.eos_id, reference.start_id
        self._prefix, self._end = b"", marker(self.eos_id).encode()
        self._start = marker(self.start_id).encode() if self.start_id >= 0 else b""
        names = {i: marker(i) for i in reference.special_ids}
        self._added, self._is_nfc = ["\0"], False
        self._knows_kinds = isinstance(reference, HuggingFaceEncoder)
        if isinstance(reference, HuggingFaceEncoder):
            self._content, self._is_nfc = reference.renamed(names), reference.vendor.normalizer is not None
            self._added += {form for text in reference.symbols for form in (text, unicodedata.normalize("NFC", text))}
        else:
            from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

            self._prefix = b" " if reference.model.add_dummy_prefix else b""
            model = ModelFile(reference.model.to_bytes())
            model.rename(names)
            model.add_dummy_prefix = False  # it is put before each text here, and many texts are encoded as one
            self._content = sentencepiece_to_tokenizer_json(model.to_bytes()).encode()
        self._open()

    def _open(self) -> None:
        import gigatoken  # Optional: where it does not load, SentencePiece does the work.

        self._tokenizer: Any = gigatoken.Tokenizer.from_json(self._content)
        self._cached_tokens = 0

    def __getstate__(self) -> dict[str, Any]:
        """gigatoken's own objects cannot be pickled: another process opens them again."""
        return {name: value for name, value in vars(self).items() if name != "_tokenizer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def encode_joined(self, texts: Sequence[str]) -> Joined:
        """Return what `Encoder.encode_joined` returns."""
        # Its calls for many texts import a large package and make lists of Python numbers, so many texts go to it as
        # one. Each stands between the names of its start piece and its end piece.
        if self._cached_tokens > MAX_CACHED_TOKENS * max(1, self.vocab_size // 32_000):
            self._open()
        as_bytes = [text.encode() for text in texts]
        given = [text and self._prefix + text for text in as_bytes] if self._prefix else [*as_bytes]
        all_given = self._is_given("".join(texts))  # as nearly always
        others = [] if all_given else [number for number, text in enumerate(texts) if not self._is_given(text)]
        for number in others:
            given[number] = b""
        marked = b"".join(self._start + text + self._end for text in given)
        ids: Ids = self._tokenizer.encode(marked).view(np.int32)
        self._cached_tokens += len(ids)
        if others:
            own = self._reference.encode_many([texts[number] for number in others])
            places = np.repeat(np.flatnonzero(ids == self.eos_id)[others], [*map(len, own)])
            ids = np.insert(ids, places, np.concatenate(own))
        return ids, [len(text) for text in as_bytes]

    def _is_given(self, text: str) -> bool:
        """True of a text that gigatoken encodes; else the tokenizer's own library does."""
        if any(added in text for added in self._added):
            return False
        if text.isascii() or not self._knows_kinds:
            return True
        known = _assigned().take(np.frombuffer(text.encode("utf-32-le"), np.uint32)).all()
        return bool(known) and (not self._is_nfc or unicodedata.is_normalized("NFC", text))


@cache
def _assigned() -> Any:
    """True for each code point that this Python's Unicode assigns."""
    return np.array([unicodedata.category(chr(code)) != "Cn" for code in range(0x110000)])


@dataclass(frozen=True)
class EncoderChoice:
    """The `Encoder` or `FastEncoder` that does the work, its vendor with the version, and why this one, for the log."""

    encoder: Any
    name: str
    reason: str


def without_gigatoken(encoder: Encoder, reason: str) -> EncoderChoice:
    return EncoderChoice(encoder, f"{encoder.library} {version(encoder.library)}", reason)


def choose(encoder: Encoder, texts: Sequence[str]) -> EncoderChoice:
    """Choose gigatoken if it is proved to give the ids of the tokenizer's own library; else that.

    The hard texts and the `texts`, a sample of the corpus, must have the same ids all the same.
    """
    faster = "gigatoken, which is faster for BPE,"
    if not isinstance(encoder, HuggingFaceEncoder) and encoder.model.is_unigram:
        return without_gigatoken(encoder, "the fastest for unigram")
    if reason := _unproved_json(encoder) if isinstance(encoder, HuggingFaceEncoder) else _unproved_model(encoder):
        return without_gigatoken(encoder, f"{faster} is not used: the model {reason}")
    try:
        fast = FastEncoder(encoder)
    except Exception as error:  # the other does the work, whatever keeps gigatoken from loading.
        return without_gigatoken(encoder, f"{faster} cannot be used here: {str(error).partition(NEWLINE)[0]}")
    sample = [*hard_texts(encoder), *texts]
    ours, theirs = (each.encode_joined(sample)[0] for each in (encoder, fast))
    if not np.array_equal(ours, theirs):
        return without_gigatoken(encoder, f"{faster} gave different ids")
    size = sum(map(len, sample))
    reason = f"proved equal to {encoder.library}, and compared on {len(sample):,} texts of {size:,} characters"
    return EncoderChoice(fast, f"gigatoken {version('gigatoken')}", reason)


def _unproved_model(encoder: Encoder) -> str:
    """Return why the ids of a SentencePiece model are not proved; empty if they are."""
    model = encoder.model
    scores = [piece.score for piece in model.pieces if piece.type is PieceType.NORMAL]
    texts = {piece.text for piece in model.pieces if piece.type in (PieceType.NORMAL, PieceType.USER_DEFINED)}
    names = [piece.text for piece in model.pieces if piece.type is PieceType.BYTE]
    halves = ({name[:i], name[i:]} for name in names for i in range(6))
    rules = {
        "is no BPE model with byte fallback": not (model.is_bpe and model.byte_fallback),
        "puts a space before every line": model.add_dummy_prefix and encoder.by_line,
        "changes its text": model.charsmap or model.remove_extra_whitespaces or model.whitespace_as_suffix,
        "has symbols with spaces": any(SPACE_MARK in symbol for symbol in encoder.symbols),
        "has two pieces of one rank, or the halves of a name": len({*scores}) < len(scores)
        or any(map(texts.issuperset, halves)),
    }
    return next((reason for reason, holds in rules.items() if holds), "")


def _unproved_json(encoder: HuggingFaceEncoder) -> str:
    """Return why the ids of a tokenizer.json are not proved; empty if they are."""
    model, settings = encoder.algorithm, encoder.settings
    if model.get("type") != "BPE" or not {*BYTES} <= model["vocab"].keys():
        return "is no byte-level BPE"
    merges = [tuple(each if isinstance(each, list) else each.split(" ")) for each in model["merges"]]
    added = {token["content"] for token in encoder.added}
    parts = settings.get("pre_tokenizer") or {}
    *splits, last = parts.get("pretokenizers", [parts])
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    known = [[split | {"pattern": {"Regex": pattern}}] if pattern else [] for pattern in PATTERNS]
    prefixes, matches = (last.get(key, True) for key in ("add_prefix_space", "use_regex"))
    is_plain = last.get("type") == "ByteLevel" and not prefixes and matches != bool(splits)
    unusual = [model.get(key) for key in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")]
    names = [encoder.encode(encoder.pieces[i]).tolist() for i in encoder.special_ids]
    rules = {
        "has a pre-tokenizer that is not known": not is_plain or splits not in known,
        "has a normalizer other than NFC": settings.get("normalizer") not in (None, {"type": "NFC"}),
        "has unusual pieces": any(unusual) or not {*"".join(model["vocab"].keys() - added)} <= BYTES.keys(),
        "merges a pair twice, or to a special token": len({*merges}) < len(merges)
        or not added.isdisjoint(map("".join, merges)),
        "takes words for special tokens": not encoder.special_ids.isdisjoint(i for ids in names for i in ids),
    }
    return next((reason for reason, holds in rules.items() if holds), "")


def marker(token_id: int) -> str:
    """Name of a control piece or <unk> for gigatoken, which takes text that spells one for it: no text holds NUL."""
    return f"\0{token_id}\0"
