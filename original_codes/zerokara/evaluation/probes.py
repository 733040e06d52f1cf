"""Minimal pairs and cloze of one text, answered by all models.

In: opened models and documents. Out: a section of accuracies for each kind of question (`minimal_pairs`, `cloze`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import orjson
import torch
import transformers

from zerokara import __version__
from zerokara.durable import write_json
from zerokara.evaluation import bits_per_byte, choices, cloze, minimal_pairs
from zerokara.evaluation.choices import Item, Scored
from zerokara.evaluation.models import LoadedModel
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
    asked: dict[str, list[Item]] = {}
    if settings.minimal_pairs:
        made = minimal_pairs.make(text.documents, settings.minimal_pairs, settings.seed)
        asked |= {f"minimal pairs, {kind}": items for kind, items in made.items()}
    if settings.cloze:
        asked["last-word cloze"] = cloze.make(text.documents, settings.cloze, settings.seed)
    scored: dict[str, dict[str, Scored]] = {name: {} for name in asked}
    not_asked: dict[str, str] = {}
    for model in models:  # each model's weights are loaded once
        reading = _ENCODER_DECODER if model.is_encoder_decoder else _reading(model)
        if isinstance(reading, str):
            not_asked[model.name] = reading
            continue
        for name, items in asked.items():
            label = f"{model.name}, {name} of {text.name}"
            scored[name][model.name] = _scored(model, items, reading.start_id, label, settings)
    return [
        choices.section(f"{name}: {text.name}", items, scored[name], not_asked, settings.seed)
        for name, items in asked.items()
    ]


def _reading(model: LoadedModel) -> bits_per_byte.Reading | str:
    """How the model reads text; the same start as in bits per byte."""
    return bits_per_byte.reading_of(model, bits_per_byte.Settings())


def _scored(model: LoadedModel, items: Sequence[Item], start_id: int, label: str, settings: Settings) -> Scored:
    """The model's answers, from the cache where it was asked before."""
    path = settings.cache / f"{_key(model, items, start_id)}.json" if settings.cache else None
    if path is not None and (found := _read(path, len(items))) is not None:
        return found
    batch_tokens = settings.batch_tokens or max(1, MAX_LOGITS // model.vocab_size)
    scored = choices.score(model, items, start_id, label, batch_tokens)
    if path is not None:
        write_json(path, {"is_right": scored.is_right.tolist(), "is_encodable": scored.is_encodable.tolist()})
    return scored


def _read(path: Path, num_items: int) -> Scored | None:
    try:
        found = orjson.loads(path.read_bytes())
        scored = Scored(np.array(found["is_right"], np.bool_), np.array(found["is_encodable"], np.bool_))
    except (OSError, orjson.JSONDecodeError, KeyError):
        return None
    return scored if len(scored.is_right) == len(scored.is_encodable) == num_items else None


def _key(model: LoadedModel, items: Sequence[Item], start_id: int) -> str:
    """Name of the answers, by content: the model, the items, and the code that asks."""
    versions = [__version__, torch.__version__, transformers.__version__]
    parts = [model.content, str(model.dtype), start_id, [item.as_json() for item in items], versions]
    return sha256(json.dumps(parts).encode()).hexdigest()[:32]
