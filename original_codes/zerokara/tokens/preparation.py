"""What is found out about the tokenizer before the work, by the nursery of the workers, which then have it open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokara.tokenizer.encoder_choice import EncoderChoice
from zerokara.tokenizer.tokenizer_facts import TokenizerFacts
from zerokara.tokens.estimate import Estimate, Place, estimate

if TYPE_CHECKING:
    from zerokara.tokenizer.encoder import Encoder


@dataclass(frozen=True)
class Prepared:
    """What was found."""

    tokenizer: TokenizerFacts
    choice: EncoderChoice
    """Without the encoder itself, which the nursery has open."""
    expected: Estimate
    notes: Sequence[str] = ()
    """What the user should know of a tokenizer that step 1 did not make."""


@dataclass(frozen=True)
class Preparation:
    """A question for the nursery: opens the tokenizer, chooses the encoder, proves it and estimates the tokens.

    Raises: UserError when the file is no tokenizer to train with, or one that no export could be proved with.
    """

    model_path: Path
    places: Sequence[Place]
    """A sample of the corpus."""
    corpus_bytes: int
    is_question = True

    def __call__(self, opened: dict[object, Any]) -> Prepared:
        from zerokara.tokenizer import compatibility, encoder_choice

        encoder, stand = _opened(self.model_path, opened)
        compatibility.check_exportable(encoder)
        turns = zip_longest(*(place.texts for place in self.places))
        texts = (text for turn in turns for text in turn if text is not None)
        choice = encoder_choice.choose(encoder, texts, self.corpus_bytes, stand)
        opened[choice.open_encoder] = choice.encoder
        expected = estimate(self.corpus_bytes, self.places, choice.encoder)
        return Prepared(encoder.facts, replace(choice, encoder=None), expected, compatibility.notes(encoder))


@dataclass(frozen=True)
class Forecast:
    """An opener for the nursery: of all that the tokenizer of a file will most likely need."""

    model_path: Path
    is_question = False

    def __call__(self) -> tuple[Encoder, Any]:
        """The encoder, and the fast encoder, or the reason why there is none."""
        from zerokara.tokenizer import encoder_choice
        from zerokara.tokenizer.encoder import Encoder

        encoder = Encoder(self.model_path)
        return encoder, encoder_choice.open_fast_encoder(encoder)


def _opened(model_path: Path, opened: dict[object, Any]) -> tuple[Encoder, Any]:
    forecast = Forecast(model_path)
    if forecast not in opened:
        opened[forecast] = forecast()
    found: tuple[Encoder, Any] = opened[forecast]
    return found
