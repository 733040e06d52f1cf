"""A faster encoder that stands in for SentencePiece where it has been proved to give the same ids; else SentencePiece.

In: the encoder of the training and some of the corpus. Out: a `Choice`, which opens the encoder to work with.

SentencePiece defines the ids. For BPE models kitoken encodes spaced scripts about three times as fast and Japanese a
fifth faster, with the same ids on all that was tried (sentencepiece 0.2.3, kitoken 0.11.1: 156 MB in five languages);
for unigram it gives other ids on every third document, and is slower. So it is offered for BPE models, for each model
only after a proof on hard texts (white space, scripts, text that spells control tokens or holds the user's symbols) and
on a sample of the corpus, and while it works a little of every batch is checked again. Whatever differs, SentencePiece
does all the work, and the user is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zerokara.tokenizer.encoder import Encoder, Ids
from zerokara.tokenizer.model_file import ModelFile
from zerokara.tokenizer.proof import hard_texts

PROOF_CHARACTERS = 1_000_000
"""Text of the corpus on which the two are compared before the work: a fifth of a second for SentencePiece."""
CHECKED_CHARACTERS = 4096
"""Text of each batch that is encoded a second time, by SentencePiece: about one part in two hundred."""
_EXCERPT_CHARACTERS = 60


class StandInDiffersError(Exception):
    """The stand-in gave other ids than SentencePiece, after it had been proved equal on a sample."""

    def __init__(self, excerpt: str) -> None:
        super().__init__(excerpt)
        self.excerpt = excerpt


@dataclass(frozen=True)
class Choice:
    """The encoder that does the work."""

    open_encoder: Callable[[], Encoder | StandIn]
    """Opens it in any process; picklable."""
    name: str
    """`sentencepiece` or `kitoken`, with the version."""
    word: str
    """Why this one, for the log."""


def choose(encoder: Encoder, texts: Iterable[str]) -> Choice:
    """Prove the stand-in on hard texts and on up to `PROOF_CHARACTERS` of `texts`; SentencePiece where it fails."""
    model = ModelFile(encoder.model_bytes)
    if model.is_unigram:
        return plain(encoder, "the quickest for unigram")
    reason = _reason_against(model)
    if reason:
        return plain(encoder, f"kitoken, which is quicker for BPE, is not used: {reason}")
    try:
        import kitoken

        stand_in = StandIn(encoder.model_path)
    except Exception as error:  # whatever keeps it from loading, the work can be done without
        return plain(encoder, f"kitoken, which is quicker for BPE, cannot be used here: {error}")
    sample = [*hard_texts(encoder), *_up_to(texts, PROOF_CHARACTERS)]
    different = first_difference(encoder, stand_in, sample)
    if different is not None:
        return plain(encoder, f"kitoken, which is quicker for BPE, gave other ids, first for {_excerpt(different)}")
    version = getattr(kitoken, "__version__", "") or _installed_version("kitoken")
    size = sum(len(text) for text in sample)
    word = f"proved equal to SentencePiece on {len(sample):,} texts of {size:,} characters; checked on while it works"
    return Choice(partial(StandIn, encoder.model_path), f"kitoken {version}", word)


def plain(encoder: Encoder, word: str) -> Choice:
    """SentencePiece itself."""
    version = _installed_version("sentencepiece")
    return Choice(partial(Encoder, encoder.model_path), f"sentencepiece {version}", word)


class StandIn:
    """kitoken in the place of `Encoder`, for the work of step 2."""

    def __init__(self, model_path: Path) -> None:
        import kitoken

        self._truth = Encoder(model_path)
        self._tokenizer: Any = kitoken.Kitoken.from_sentencepiece_file(str(model_path))
        self.vocab_size, self.eos_id = self._truth.vocab_size, self._truth.eos_id

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
        # Second argument: text that spells a control token is text.
        return [np.array(ids, dtype=np.int32) for ids in self._tokenizer.encode_all(list(texts), False)]

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


def _installed_version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
