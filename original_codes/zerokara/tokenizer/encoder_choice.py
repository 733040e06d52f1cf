"""Which encoder step 2 uses: gigatoken where it is proved to give SentencePiece's ids, else SentencePiece itself.

In: the encoder that training uses and some of the corpus. Out: an `EncoderChoice`, which any process can open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.fast_encoder import FastEncoder, excerpt, first_difference, reason_against
from zerokara.tokenizer.hard_texts import hard_texts
from zerokara.tokenizer.tokenizer_facts import TokenizerFacts

PROOF_SHARE = 0.01
"""Share of the corpus on which the two are compared before the work, within the limits below."""
MIN_PROOF_CHARACTERS, MAX_PROOF_CHARACTERS = 200_000, 1_000_000
"""At most a fifth of a second for SentencePiece."""


@dataclass(frozen=True)
class EncoderOpener:
    """Opens an encoder in any process; picklable, equal where the encoders are."""

    model_path: Path
    fast: bool = False
    """Whether to open a `FastEncoder`."""
    run_characters: int | None = None
    """`Encoder.run_characters`, where it is known."""

    def __call__(self) -> Encoder | FastEncoder:
        """Open it."""
        return FastEncoder(self.model_path) if self.fast else Encoder(self.model_path, self.run_characters)


@dataclass(frozen=True)
class EncoderChoice:
    """The encoder that does the work."""

    encoder: Any
    """Opened, in this process; None where only another process has it open."""
    open_encoder: Callable[[], Any]
    """Opens it in any other process; most often an `EncoderOpener`."""
    name: str
    """`sentencepiece` or `gigatoken`, with the version."""
    reason: str
    """Why this one, for the log."""


def sentencepiece_itself(tokenizer: Encoder | TokenizerFacts, reason: str) -> EncoderChoice:
    """Choose SentencePiece."""
    opener = EncoderOpener(tokenizer.model_path, run_characters=tokenizer.run_characters)
    encoder = tokenizer if isinstance(tokenizer, Encoder) else None
    return EncoderChoice(encoder, opener, f"sentencepiece {version('sentencepiece')}", reason)


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


def choose(
    encoder: Encoder, texts: Iterable[str], corpus_bytes: int = 0, fast: FastEncoder | str | None = None
) -> EncoderChoice:
    """Choose gigatoken if it gives SentencePiece's ids on the hard texts and on a sample; else SentencePiece.

    The sample is as much of `texts` as fits a corpus of `corpus_bytes`. `fast` is the result of `open_fast_encoder`,
    where that was called before.
    """
    fast = open_fast_encoder(encoder) if fast is None else fast
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
    opener = EncoderOpener(encoder.model_path, fast=True)
    return EncoderChoice(fast, opener, f"gigatoken {version('gigatoken')}", reason)


def _up_to(texts: Iterable[str], characters: int) -> list[str]:
    """As many texts as hold so many characters."""
    taken, size = [], 0
    for text in texts:
        taken.append(text)
        size += len(text)
        if size >= characters:
            break
    return taken
