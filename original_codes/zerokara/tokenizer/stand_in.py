"""A faster encoder that stands in for SentencePiece where it has been proved to give the same ids; else SentencePiece.

In: the encoder of the training and some of the corpus. Out: a `Choice`, which opens the encoder to work with.

SentencePiece defines the ids. For BPE models gigatoken (0.10.0, which Megatron-LM uses too) gives the same, on one core
80 MB/s of English where SentencePiece gives 6, and 40 of Japanese where it gives 24, by remembering what it has cut
before. So it is offered for BPE models with byte fallback, for each model only after a proof on hard texts (white
space, scripts, text that spells control tokens or holds the user's symbols) and on a sample of the corpus, and while
it works a little of every batch is checked again. Whatever differs, SentencePiece does all the work, and the user is
told. For unigram nothing faster was found: kitoken 0.11.1 is slower and gives other ids on every third document,
gigatoken does not do it.

Three things to know about gigatoken: it takes text that spells a control piece for that piece, so it is given the model
with names that no text can hold (a NUL is no text here); its memory of what it has cut grows without a limit, so it is
opened anew now and then; its calls for many texts at once import a large package and make lists of Python numbers, so
texts go to it one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zerokara.tokenizer.encoder import Encoder, Ids
from zerokara.tokenizer.model_file import Kind, ModelFile
from zerokara.tokenizer.proof import hard_texts

PROOF_SHARE = 0.01
MIN_PROOF_CHARACTERS, MAX_PROOF_CHARACTERS = 200_000, 1_000_000
"""Text of the corpus on which the two are compared before the work: at most a fifth of a second for SentencePiece."""
CHECKED_CHARACTERS = 1024
"""Text of each batch that is encoded a second time, by SentencePiece: about one part in a thousand."""
MAX_REMEMBERED_TOKENS = 8_000_000
"""After so many tokens (some 40 MB of text) it is opened anew: its memory has then grown by about 100 MB."""
_EXCERPT_CHARACTERS = 60


class StandInDiffersError(Exception):
    """The stand-in gave other ids than SentencePiece, after it had been proved equal on a sample."""

    def __init__(self, excerpt: str) -> None:
        super().__init__(excerpt)
        self.excerpt = excerpt


@dataclass(frozen=True)
class Opener:
    """Opens an encoder in any process: picklable, and equal where the encoders are."""

    model_path: Path
    quick: bool = False
    """Whether the stand-in is meant."""
    run_characters: int | None = None
    """`Encoder.run_characters`, where it is known."""

    def __call__(self) -> Encoder | StandIn:
        """Open it."""
        return StandIn(self.model_path) if self.quick else Encoder(self.model_path, self.run_characters)


@dataclass(frozen=True)
class Choice:
    """The encoder that does the work."""

    encoder: Encoder | StandIn
    """Opened, for this process."""
    open_encoder: Opener
    """Opens it in any other."""
    name: str
    """`sentencepiece` or `gigatoken`, with the version."""
    word: str
    """Why this one, for the log."""


def likely(encoder: Encoder) -> Opener:
    """What `choose` will most likely choose, so that other processes can begin to open it."""
    quick = not encoder.model.is_unigram and not _reason_against(encoder.model)
    return Opener(encoder.model_path, quick, None if quick else encoder.run_characters)


def choose(encoder: Encoder, texts: Iterable[str], corpus_bytes: int = 0) -> Choice:
    """Prove the stand-in on hard texts and on so much of `texts` as fits the size of the corpus; else SentencePiece."""
    model = encoder.model
    if model.is_unigram:
        return plain(encoder, "the quickest for unigram")
    reason = _reason_against(model)
    if reason:
        return plain(encoder, f"gigatoken, which is quicker for BPE, is not used: {reason}")
    try:
        stand_in = StandIn(encoder.model_path, encoder)
    except Exception as error:  # whatever keeps it from loading, the work can be done without
        return plain(encoder, f"gigatoken, which is quicker for BPE, cannot be used here: {error}")
    characters = min(max(int(PROOF_SHARE * corpus_bytes), MIN_PROOF_CHARACTERS), MAX_PROOF_CHARACTERS)
    sample = [*hard_texts(encoder), *_up_to(texts, characters)]
    different = first_difference(encoder, stand_in, sample)
    if different is not None:
        return plain(encoder, f"gigatoken, which is quicker for BPE, gave other ids, first for {_excerpt(different)}")
    size = sum(len(text) for text in sample)
    word = f"proved equal to SentencePiece on {len(sample):,} texts of {size:,} characters; checked on while it works"
    return Choice(stand_in, Opener(encoder.model_path, quick=True), f"gigatoken {_version('gigatoken')}", word)


def plain(encoder: Encoder, word: str) -> Choice:
    """SentencePiece itself."""
    opener = Opener(encoder.model_path, run_characters=encoder.run_characters)
    return Choice(encoder, opener, f"sentencepiece {_version('sentencepiece')}", word)


class StandIn:
    """gigatoken in the place of `Encoder`, for the work of step 2."""

    def __init__(self, model_path: Path, truth: Encoder | None = None) -> None:
        """`truth` is the encoder for that path where it is open already."""
        self._truth = truth or Encoder(model_path)
        self._model = _without_control_names(self._truth.model_bytes)
        self.vocab_size, self.eos_id = self._truth.vocab_size, self._truth.eos_id
        self._open()

    def _open(self) -> None:
        import gigatoken

        self._tokenizer: Any = gigatoken.Tokenizer.from_sentencepiece(self._model)
        self._tokens = 0

    def encode_many(self, texts: Iterable[str]) -> list[Ids]:
        """The ids of each document, as `Encoder.encode_many` gives them.

        Raises:
            StandInDiffersError: they are not the same on the part that is checked.
        """
        listed = list(texts)
        documents = self._encode(listed)
        self._check(listed)
        return documents

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        if self._tokens > MAX_REMEMBERED_TOKENS:
            self._open()
        encode = self._tokenizer.encode
        documents = [encode(text).view(np.int32) for text in texts]
        self._tokens += sum(map(len, documents))
        return documents

    def _check(self, texts: Sequence[str]) -> None:
        """Encode a little of the batch again: the beginning of the document that its size picks, another each time."""
        if texts:
            text = texts[sum(map(len, texts)) % len(texts)]
            if first_difference(self._truth, self, [text[:CHECKED_CHARACTERS]]) is not None:
                raise StandInDiffersError(_excerpt(text))


def first_difference(encoder: Encoder, stand_in: StandIn, texts: Sequence[str]) -> str | None:
    """The first text of which the two give other ids."""
    for text, ours, theirs in zip(texts, encoder.encode_many(texts), stand_in._encode(texts), strict=True):
        if not np.array_equal(ours, theirs):
            return text
    return None


def _reason_against(model: ModelFile) -> str:
    """Why a model is outside what has been tried, if it is."""
    if not model.is_bpe:
        return "the model is neither unigram nor BPE"
    if not model.byte_fallback:
        return "the model has no byte fallback"
    if model.add_dummy_prefix:
        return "the model puts a space before every line"
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


def _version(package: str) -> str:
    from importlib.metadata import version  # the workers need it not, and it takes as long as the rest of this module

    return version(package)


def _without_control_names(model: bytes) -> bytes:
    """The model with names for its control pieces, and the unknown one, that stand in no text."""
    renamed = ModelFile(model)
    renamed.rename(
        {i: f"\0{i}" for i, piece in enumerate(renamed.pieces) if piece.kind in (Kind.CONTROL, Kind.UNKNOWN)}
    )
    return renamed.to_bytes()
