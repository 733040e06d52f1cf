"""A faster encoder that stands in for SentencePiece where it has been proved to give the same ids; else SentencePiece.

In: the encoder of the training and some of the corpus. Out: a `Choice`, which opens the encoder to work with.

SentencePiece defines the ids. For BPE models gigatoken (0.10.0, which Megatron-LM uses too) gives the same, on one core
80 MB/s of English where SentencePiece gives 6, and 40 of Japanese where it gives 24, by remembering what it has cut
before. So it is offered for BPE models with byte fallback (a dummy prefix before a document we put there ourselves, as
a space), for each model only after a proof on hard texts (white space, scripts, text that spells control tokens or
holds the user's symbols) and on a sample of the corpus, and while it works a little of every batch is checked again.
Whatever differs, SentencePiece does all the work, and the user is told. For unigram nothing faster was found: kitoken
0.11.1 is slower and gives other ids on every third document, gigatoken does not do it.

Three things to know about gigatoken: it takes text that spells a control piece for that piece, so it is given the model
with names that no text can hold (`stand_in_model`); its memory of what it has cut grows without a limit, so it is
opened anew now and then; its calls for many texts at once import a large package and make lists of Python numbers, so
many texts go to it as one, with the name of the end of a document after each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerokara.tokenizer.choice import Choice, Opener, StandInDiffersError, plain, version_of
from zerokara.tokenizer.encoder import Encoder, Ids, Joined
from zerokara.tokenizer.model_file import ModelFile
from zerokara.tokenizer.proof import hard_texts
from zerokara.tokenizer.stand_in_model import marker, tokenizer_json

__all__ = ["Choice", "Opener", "StandIn", "StandInDiffersError", "choose", "first_difference", "opened", "plain"]

PROOF_SHARE = 0.01
MIN_PROOF_CHARACTERS, MAX_PROOF_CHARACTERS = 200_000, 1_000_000
"""Text of the corpus on which the two are compared before the work: at most a fifth of a second for SentencePiece."""
CHECKED_CHARACTERS = 1024
"""Text of each batch that is encoded a second time, by SentencePiece: about one part in a thousand."""
MAX_REMEMBERED_TOKENS = 8_000_000
"""After so many tokens (some 40 MB of text) it is opened anew: its memory has then grown by about 100 MB."""
_EXCERPT_CHARACTERS = 60


def opened(encoder: Encoder) -> StandIn | str:
    """The stand-in, not proved yet, or why there is none."""
    model = encoder.model
    if model.is_unigram:
        return "the quickest for unigram"
    reason = _reason_against(model, encoder.by_line)
    if reason:
        return f"gigatoken, which is quicker for BPE, is not used: {reason}"
    try:
        return StandIn(encoder.model_path, encoder)
    except Exception as error:  # whatever keeps it from loading, the work can be done without
        return f"gigatoken, which is quicker for BPE, cannot be used here: {error}"


def choose(
    encoder: Encoder, texts: Iterable[str], corpus_bytes: int = 0, stand_in: StandIn | str | None = None
) -> Choice:
    """Prove the stand-in on hard texts and on so much of `texts` as fits the size of the corpus; else SentencePiece.

    `stand_in` is what `opened` gave, where it was asked before.
    """
    stand_in = opened(encoder) if stand_in is None else stand_in
    if isinstance(stand_in, str):
        return plain(encoder, stand_in)
    characters = min(max(int(PROOF_SHARE * corpus_bytes), MIN_PROOF_CHARACTERS), MAX_PROOF_CHARACTERS)
    sample = [*hard_texts(encoder), *_up_to(texts, characters)]
    different = first_difference(encoder, stand_in, sample)
    if different is not None:
        return plain(encoder, f"gigatoken, which is quicker for BPE, gave other ids, first for {_excerpt(different)}")
    size = sum(len(text) for text in sample)
    word = f"proved equal to SentencePiece on {len(sample):,} texts of {size:,} characters; checked on while it works"
    return Choice(stand_in, Opener(encoder.model_path, quick=True), f"gigatoken {version_of('gigatoken')}", word)


class StandIn:
    """gigatoken in the place of `Encoder`, for the work of step 2."""

    def __init__(self, model_path: Path, truth: Encoder | None = None) -> None:
        """`truth` is the encoder for that path where it is open already."""
        self._truth = truth or Encoder(model_path)
        self._model = tokenizer_json(self._truth.model)
        self.vocab_size, self.eos_id = self._truth.vocab_size, self._truth.eos_id
        self._prefix = b" " if self._truth.model.add_dummy_prefix else b""
        self._end = marker(self.eos_id).encode()
        self._open()

    def _open(self) -> None:
        import gigatoken

        self._tokenizer: Any = gigatoken.Tokenizer.from_json(self._model)
        self._tokens = 0

    def encode_joined(self, texts: Sequence[str]) -> Joined:
        """As `Encoder.encode_joined` gives them.

        Raises:
            StandInDiffersError: they are not the same on the part that is checked.
        """
        joined = self._joined(texts)
        self._check(texts)
        return joined

    def _joined(self, texts: Sequence[str]) -> Joined:
        if self._tokens > MAX_REMEMBERED_TOKENS:
            self._open()
        as_bytes = [text.encode() for text in texts]
        prefixed = [text and self._prefix + text for text in as_bytes] if self._prefix else as_bytes
        ids: Ids = self._tokenizer.encode(self._end.join([*prefixed, b""])).view(np.int32)
        self._tokens += len(ids)
        return ids, [len(text) for text in as_bytes]

    def _check(self, texts: Sequence[str]) -> None:
        """Encode a little of the batch again: the beginning of the document that its size picks, another each time."""
        if texts:
            text = texts[sum(map(len, texts)) % len(texts)]
            if first_difference(self._truth, self, [text[:CHECKED_CHARACTERS]]) is not None:
                raise StandInDiffersError(_excerpt(text))


def first_difference(encoder: Encoder, stand_in: StandIn, texts: Sequence[str]) -> str | None:
    """The first text of which the two give other ids; all of them where they differ only together."""
    if _equal(encoder, stand_in, texts):
        return None
    return next((text for text in texts if not _equal(encoder, stand_in, [text])), "".join(texts))


def _equal(encoder: Encoder, stand_in: StandIn, texts: Sequence[str]) -> bool:
    ours, theirs = encoder.encode_joined(texts), stand_in._joined(texts)
    return np.array_equal(ours[0], theirs[0]) and ours[1] == theirs[1]


def _reason_against(model: ModelFile, by_line: bool) -> str:
    """Why a model is outside what has been tried, if it is."""
    if not model.is_bpe:
        return "the model is neither unigram nor BPE"
    if not model.byte_fallback:
        return "the model has no byte fallback"
    if model.add_dummy_prefix and (by_line or model.remove_extra_whitespaces):
        return f"the model puts a space before every {'line' if by_line else 'text that it has trimmed'}"
    return ""


def _up_to(texts: Iterable[str], characters: int) -> list[str]:
    taken, size = [], 0
    for text in texts:
        taken.append(text)
        size += len(text)
        if size >= characters:
            break
    return taken


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT_CHARACTERS else text[: _EXCERPT_CHARACTERS - 3] + "...")
