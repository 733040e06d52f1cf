"""Minimal pairs and cloze of one text, answered by all models.

In: opened models and documents. Out: a section of accuracies for each kind of question (`minimal_pairs`, `cloze`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerokara.evaluation import bits_per_byte, cache, choices, cloze, minimal_pairs
from zerokara.evaluation.choices import Item, Scored
from zerokara.evaluation.models import SEES_LATER_TOKENS, LoadedModel
from zerokara.evaluation.results import Section
from zerokara.evaluation.texts import MeasuredText

_ENCODER_DECODER = "not asked: an encoder-decoder has no probability of how a text goes on"
MAX_LOGITS = 2**26
"""Logits of a batch: 256 MB in fp32."""


@dataclass(frozen=True)
class Settings:
    """What to ask, as in `config.evaluate_config`."""

    minimal_pairs: int
    """Items of each kind; 0 for none."""
    cloze: int
    batch_tokens: int | None = None
    seed: int = 1234
    cache: Path | None = None
    """Folder in which answers are kept; None for nowhere."""


def measure(models: Sequence[LoadedModel], text: MeasuredText, settings: Settings) -> list[Section]:
    """Ask every model the questions that `text` gives."""
    asked = items_of(text, settings)
    answers = {model.name: ask(model, text, asked, settings) for model in models}
    return sections(text, asked, answers, settings)


def items_of(text: MeasuredText, settings: Settings) -> dict[str, list[Item]]:
    """The questions that a text gives, by kind."""
    asked: dict[str, list[Item]] = {}
    if settings.minimal_pairs:
        made = minimal_pairs.make(text.documents, settings.minimal_pairs, settings.seed)
        asked |= {f"minimal pairs, {kind}": items for kind, items in made.items()}
    if settings.cloze:
        asked["last-word cloze"] = cloze.make(text.documents, settings.cloze, settings.seed)
    return asked


def ask(
    model: LoadedModel, text: MeasuredText, asked: Mapping[str, list[Item]], settings: Settings
) -> dict[str, Scored] | str:
    """A model's answers to each kind of question, or why it cannot answer."""
    reading = _ENCODER_DECODER if model.is_encoder_decoder else _reading(model)
    if isinstance(reading, str):
        return reading
    answers = {}
    for name, items in asked.items():
        found = _scored(model, items, reading.start_id, f"{model.name}, {name} of {text.name}", settings)
        if isinstance(found, str):
            return found
        answers[name] = found
    return answers


def sections(
    text: MeasuredText,
    asked: Mapping[str, list[Item]],
    answers: Mapping[str, dict[str, Scored] | str],
    settings: Settings,
) -> list[Section]:
    """The models side by side, for each kind of question."""
    not_asked = {model: each for model, each in answers.items() if isinstance(each, str)}
    scored = {model: each for model, each in answers.items() if not isinstance(each, str)}
    return [
        choices.section(
            f"{name}: {text.name}",
            items,
            {model: each[name] for model, each in scored.items()},
            not_asked,
            settings.seed,
        )
        for name, items in asked.items()
    ]


def _reading(model: LoadedModel) -> bits_per_byte.Reading | str:
    """How the model reads text; the same start as in bits per byte."""
    return bits_per_byte.reading_of(model, bits_per_byte.Settings())


def _scored(model: LoadedModel, items: Sequence[Item], start_id: int, label: str, settings: Settings) -> Scored | str:
    """The model's answers, from the cache where it was asked before; or why it cannot answer."""
    asked = [item.as_json() for item in items]
    folder = cache.folder_of(settings.cache, model.content, str(model.dtype), start_id, asked)
    if (found := cache.read(folder, 0, len(items), Scored.of_lists)) is not None:
        return found
    if not model.is_causal:
        return SEES_LATER_TOKENS
    batch_tokens = settings.batch_tokens or max(1, MAX_LOGITS // model.vocab_size)
    scored = choices.score(model, items, start_id, label, batch_tokens)
    if not scored.num_unknown:
        cache.write(folder, 0, {"is_right": scored.is_right.tolist(), "is_encodable": scored.is_encodable.tolist()})
    return scored
