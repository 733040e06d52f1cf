"""Which encoder step 2 uses: gigatoken where it is proved to give SentencePiece's ids, else SentencePiece itself.

In: the encoder that training uses and some of the corpus. Out: an `EncoderChoice`, with an encoder that can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.fast_encoder import FastEncoder, excerpt, first_difference, reason_against
from zerokara.tokenizer.hard_texts import hard_texts

PROOF_SHARE = 0.01
"""Share of the corpus on which the two are compared before the work, within the limits below."""
MIN_PROOF_CHARACTERS, MAX_PROOF_CHARACTERS = 200_000, 1_000_000
"""At most a fifth of a second for SentencePiece."""


@dataclass(frozen=True)
class EncoderChoice:
    """The encoder that does the work."""

    encoder: Any
    """An `Encoder` or a `FastEncoder`, which can be pickled."""
    name: str
    """`sentencepiece` or `gigatoken`, with the version."""
    reason: str
    """Why this one, for the log."""


def sentencepiece_itself(encoder: Encoder, reason: str) -> EncoderChoice:
    """Choose SentencePiece."""
    return EncoderChoice(encoder, f"sentencepiece {version('sentencepiece')}", reason)


def open_fast_encoder(encoder: Encoder) -> FastEncoder | str:
    """Open the fast encoder of the same model, not proved yet, or give the reason why there is none."""
    model = encoder.model
    if model.is_unigram:
        return "the fastest for unigram"
    if reason := reason_against(model, encoder.by_line):
        return f"gigatoken, which is faster for BPE, is not used: {reason}"
    try:
        return FastEncoder(encoder.model_path, encoder)
    except Exception as error:  # Whatever keeps it from loading, the work can be done without it.
        return f"gigatoken, which is faster for BPE, cannot be used here: {error}"


def choose(encoder: Encoder, texts: Iterable[str], corpus_bytes: int = 0) -> EncoderChoice:
    """Choose gigatoken if it gives SentencePiece's ids on the hard texts and on a sample; else SentencePiece.

    The sample is as much of `texts` as fits a corpus of `corpus_bytes`.
    """
    fast = open_fast_encoder(encoder)
    if isinstance(fast, str):
        return sentencepiece_itself(encoder, fast)
    characters = min(max(int(PROOF_SHARE * corpus_bytes), MIN_PROOF_CHARACTERS), MAX_PROOF_CHARACTERS)
    sample = [*hard_texts(encoder), *_up_to(texts, characters)]
    different = first_difference(encoder, fast, sample)
    if different is not None:
        reason = f"gigatoken, which is faster for BPE, gave different ids, first for {excerpt(different)}"
        return sentencepiece_itself(encoder, reason)
    size = sum(len(text) for text in sample)
    reason = f"proved equal to SentencePiece on {len(sample):,} texts of {size:,} characters; checked while it works"
    return EncoderChoice(fast, f"gigatoken {version('gigatoken')}", reason)


def _up_to(texts: Iterable[str], characters: int) -> list[str]:
    """As many texts as hold so many characters."""
    taken, size = [], 0
    for text in texts:
        taken.append(text)
        size += len(text)
        if size >= characters:
            break
    return taken
