"""The encoder of step 2: gigatoken for BPE models where it is proved to give SentencePiece's ids, else SentencePiece.

In: the encoder that training uses, and some of the corpus. Out: an `EncoderChoice`, whose encoder can be pickled.
gigatoken (0.10.0, which Megatron-LM uses too) caches what it has segmented before: one
core encodes 80 MB/s of English where SentencePiece encodes 6, and 40 of Japanese where it encodes 24. If any ids
differ, before the work or during it, SentencePiece does all of it, and the log says so. For unigram nothing faster was
found: kitoken 0.11.1 is slower and gives other ids on every third document, gigatoken does not support it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from zerokara.tokenizer.compatibility import hard_texts
from zerokara.tokenizer.encoder import Encoder, Ids, Joined
from zerokara.tokenizer.hugging_face import HuggingFaceEncoder
from zerokara.tokenizer.model_file import NEWLINE, ModelFile

PROOF_SHARE = 0.01
"""Share of the corpus on which the two are compared before the work, within the limits below."""
MIN_PROOF_CHARACTERS, MAX_PROOF_CHARACTERS = 200_000, 1_000_000
"""At most a fifth of a second for SentencePiece."""
CHECKED_CHARACTERS = 1024
"""Text of each batch that the other library encodes a second time: about one part in a thousand."""
MAX_CACHED_TOKENS = 8_000_000
"""Tokens (some 40 MB of text) after which gigatoken is reopened: its cache, by then some 100 MB, has no limit. Four
times as many for a vocabulary of 150,000 pieces, with which it takes a second to open."""


class FastEncoderDiffersError(Exception):
    """The fast encoder gave other ids for this text, though it was proved equal on a sample."""


class FastEncoder:
    """gigatoken in the place of `Encoder`, for step 2."""

    def __init__(self, reference: Encoder) -> None:
        self._reference = reference
        self.model_path, self.sha256 = reference.model_path, reference.sha256
        self.vocab_size, self.eos_id = reference.vocab_size, reference.eos_id
        self._prefix, self._end = b"", marker(self.eos_id).encode()
        names = {i: marker(i) for i in reference.special_ids}
        if isinstance(reference, HuggingFaceEncoder):
            self._content = reference.renamed(names)
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
        """Return what `Encoder.encode_joined` returns.

        Raises:
            FastEncoderDiffersError: the ids differ in the part that is checked.
        """
        joined = self.encode_unchecked(texts)
        if texts:
            # The beginning of one document, picked by the size of the batch so that it varies.
            text = texts[sum(map(len, texts)) % len(texts)]
            if _first_difference(self._reference, self, [text[:CHECKED_CHARACTERS]]) is not None:
                raise FastEncoderDiffersError(_excerpt(text))
        return joined

    def encode_unchecked(self, texts: Sequence[str]) -> Joined:
        """Return gigatoken's ids as they are."""
        # Its calls for many texts import a large package and make lists of Python numbers, so many texts go to it as
        # one, each followed by the name of the end-of-document piece.
        if self._cached_tokens > MAX_CACHED_TOKENS * max(1, self.vocab_size // 32_000):
            self._open()
        as_bytes = [text.encode() for text in texts]
        prefixed = [text and self._prefix + text for text in as_bytes] if self._prefix else as_bytes
        ids: Ids = self._tokenizer.encode(self._end.join([*prefixed, b""])).view(np.int32)
        self._cached_tokens += len(ids)
        return ids, [len(text) for text in as_bytes]


@dataclass(frozen=True)
class EncoderChoice:
    """The `Encoder` or `FastEncoder` that does the work, its vendor with the version, and why this one, for the log."""

    encoder: Any
    name: str
    reason: str


def without_gigatoken(encoder: Encoder, reason: str) -> EncoderChoice:
    """Choose the tokenizer's own library."""
    return EncoderChoice(encoder, f"{encoder.library} {version(encoder.library)}", reason)


def choose(encoder: Encoder, texts: Iterable[str], corpus_bytes: int = 0) -> EncoderChoice:
    """Choose gigatoken if it gives the ids of the tokenizer's own library on the hard texts and on a sample; else that.

    The sample is the beginning of `texts`: `PROOF_SHARE` of the `corpus_bytes`, within its limits.
    """
    faster, untried = "gigatoken, which is faster for BPE,", ""
    if isinstance(encoder, HuggingFaceEncoder):
        untried = "" if encoder.is_bpe else "is no BPE model"
    elif (model := encoder.model).is_unigram:
        return without_gigatoken(encoder, "the fastest for unigram")
    elif not (model.is_bpe and model.byte_fallback):
        untried = "is no BPE model with byte fallback"
    elif model.add_dummy_prefix and (encoder.by_line or model.remove_extra_whitespaces):
        untried = f"puts a space before every {'line' if encoder.by_line else 'text that it has trimmed'}"
    if untried:
        return without_gigatoken(encoder, f"{faster} is not used: the model {untried}")
    try:
        fast = FastEncoder(encoder)
    except Exception as error:  # the other does the work, whatever keeps gigatoken from loading.
        return without_gigatoken(encoder, f"{faster} cannot be used here: {str(error).partition(NEWLINE)[0]}")
    limit = min(max(int(PROOF_SHARE * corpus_bytes), MIN_PROOF_CHARACTERS), MAX_PROOF_CHARACTERS)
    sample, characters = hard_texts(encoder), 0
    for text in texts:
        sample.append(text)
        characters += len(text)
        if characters >= limit:
            break
    different = _first_difference(encoder, fast, sample)
    if different is not None:
        return without_gigatoken(encoder, f"{faster} gave different ids, first for {_excerpt(different)}")
    size = sum(map(len, sample))
    reason = (
        f"proved equal to {encoder.library} on {len(sample):,} texts of {size:,} characters; checked while it works"
    )
    return EncoderChoice(fast, f"gigatoken {version('gigatoken')}", reason)


def _first_difference(encoder: Encoder, fast: FastEncoder, texts: Sequence[str]) -> str | None:
    """Return the first text with different ids; all of them joined where they differ only together; else None."""

    def equal(some: Sequence[str]) -> bool:
        ours, theirs = encoder.encode_joined(some), fast.encode_unchecked(some)
        return np.array_equal(ours[0], theirs[0]) and ours[1] == theirs[1]

    return None if equal(texts) else next((text for text in texts if not equal([text])), "".join(texts))


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def marker(token_id: int) -> str:
    """Name of a control piece or <unk> for gigatoken, which takes text that spells one for it: no text holds NUL."""
    return f"\0{token_id}\0"
