"""gigatoken as an encoder of BPE models, checked against SentencePiece while it works.

In: a SentencePiece BPE model with byte fallback, and texts. Out: SentencePiece's ids, or a `FastEncoderDiffersError`.

SentencePiece defines the ids. For BPE models gigatoken (0.10.0, which Megatron-LM uses too) gives the same; by caching
what it has segmented before, one core encodes 80 MB/s of English where SentencePiece encodes 6, and 40 of Japanese
where it encodes 24. `encoder_choice` proves each model on hard texts (white space, scripts, text that spells control
tokens or holds the user's symbols) and on a sample of the corpus before the work; during the work a little of every
batch is encoded a second time by SentencePiece. If anything differs, SentencePiece does all the work, and the user is
told. For unigram nothing faster was found: kitoken 0.11.1 is slower and gives different ids on every third document,
gigatoken does not support it.

Three traps in gigatoken: it takes text that spells a control piece for that piece, so it gets the model with names
that no text can hold (`fast_encoder_model`); its cache grows without a limit, so it is reopened now and then; its calls
for many texts at once import a large package and make lists of Python numbers, so many texts go to it as one, each
followed by the name of the end-of-document piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerokara.tokenizer.encoder import Encoder, Ids, Joined
from zerokara.tokenizer.fast_encoder_model import marker, tokenizer_json
from zerokara.tokenizer.model_file import ModelFile

CHECKED_CHARACTERS = 1024
"""Text of each batch that SentencePiece encodes a second time: about one part in a thousand."""
MAX_CACHED_TOKENS = 8_000_000
"""After so many tokens (some 40 MB of text) it is reopened: its cache has then grown by about 100 MB."""
_EXCERPT_CHARACTERS = 60


class FastEncoderDiffersError(Exception):
    """The fast encoder gave other ids than SentencePiece, after it had been proved equal on a sample."""

    def __init__(self, excerpt: str) -> None:
        super().__init__(excerpt)
        self.excerpt = excerpt


class FastEncoder:
    """gigatoken in the place of `Encoder`, for step 2."""

    def __init__(self, model_path: Path, reference: Encoder | None = None) -> None:
        """`reference` is the encoder of the same model where it is open already."""
        self._reference = reference or Encoder(model_path)
        self._model = tokenizer_json(self._reference.model)
        self.vocab_size, self.eos_id = self._reference.vocab_size, self._reference.eos_id
        self._prefix = b" " if self._reference.model.add_dummy_prefix else b""
        self._end = marker(self.eos_id).encode()
        self._open()

    @property
    def model_path(self) -> Path:
        """The tokenizer's file."""
        return self._reference.model_path

    @property
    def sha256(self) -> str:
        """Of that file."""
        return self._reference.sha256

    def _open(self) -> None:
        import gigatoken  # Optional: where it does not load, SentencePiece does the work.

        self._tokenizer: Any = gigatoken.Tokenizer.from_json(self._model)
        self._cached_tokens = 0

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to reopen it: gigatoken's own objects cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "_tokenizer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def encode_joined(self, texts: Sequence[str]) -> Joined:
        """Return what `Encoder.encode_joined` returns.

        Raises:
            FastEncoderDiffersError: the ids differ in the part that is checked.
        """
        joined = self.encode_unchecked(texts)
        self._check(texts)
        return joined

    def encode_unchecked(self, texts: Sequence[str]) -> Joined:
        """Return gigatoken's ids as they are."""
        if self._cached_tokens > MAX_CACHED_TOKENS:
            self._open()
        as_bytes = [text.encode() for text in texts]
        prefixed = [text and self._prefix + text for text in as_bytes] if self._prefix else as_bytes
        ids: Ids = self._tokenizer.encode(self._end.join([*prefixed, b""])).view(np.int32)
        self._cached_tokens += len(ids)
        return ids, [len(text) for text in as_bytes]

    def _check(self, texts: Sequence[str]) -> None:
        """Compare the beginning of one document, picked by the size of the batch so that it varies."""
        if texts:
            text = texts[sum(map(len, texts)) % len(texts)]
            if first_difference(self._reference, self, [text[:CHECKED_CHARACTERS]]) is not None:
                raise FastEncoderDiffersError(excerpt(text))


def first_difference(encoder: Encoder, fast: FastEncoder, texts: Sequence[str]) -> str | None:
    """Return the first text with different ids; all of them joined where they differ only together; else None."""
    if _equal(encoder, fast, texts):
        return None
    return next((text for text in texts if not _equal(encoder, fast, [text])), "".join(texts))


def _equal(encoder: Encoder, fast: FastEncoder, texts: Sequence[str]) -> bool:
    ours, theirs = encoder.encode_joined(texts), fast.encode_unchecked(texts)
    return np.array_equal(ours[0], theirs[0]) and ours[1] == theirs[1]


def reason_against(model: ModelFile, by_line: bool) -> str:
    """Why a model is outside what gigatoken was tried with; empty where it is not."""
    if not model.is_bpe:
        return "the model is neither unigram nor BPE"
    if not model.byte_fallback:
        return "the model has no byte fallback"
    if model.add_dummy_prefix and (by_line or model.remove_extra_whitespaces):
        return f"the model puts a space before every {'line' if by_line else 'text that it has trimmed'}"
    return ""


def excerpt(text: str) -> str:
    """The beginning of a text, as Python writes it."""
    return repr(text if len(text) <= _EXCERPT_CHARACTERS else text[: _EXCERPT_CHARACTERS - 3] + "...")
