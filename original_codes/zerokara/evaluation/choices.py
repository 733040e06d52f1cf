"""Multiple choice by total log-probability: the part that minimal pairs and cloze have in common.

In: a causal Hugging Face model, its tokenizer, and items: a text that breaks off, and several ways to go on, of which
the first is what was really written. Out: for each item whether the model finds the true one likelier than every other.
An encoder-decoder has no probability of a text that goes on, and is not asked.

A score must not depend on how many tokens a tokenizer makes of a word beside its neighbours. So each part of an item is
encoded by itself, as it stands after text, and the ids are joined: a word has the same ids wherever it is offered, and
the context has the same ids before each alternative. Together with items in which every word is the true one as often
as it is a false one, this gives a model that knows nothing exactly the accuracy of guessing, with any tokenizer.

Shape suffixes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zerokara.evaluation.intervals import SMALL_SAMPLE, percent
from zerokara.evaluation.measures import share
from zerokara.evaluation.models import LoadedModel
from zerokara.evaluation.results import Baseline, PairedDifference, Row, Section
from zerokara.progress import Progress, plural

_ANCHORS = ("a", ".", "\n")
"""Text before a part while it is encoded, so that no tokenizer takes the part for the start of a text. The first counts
that the part does not change; a tokenizer that joins a space to the word before it may leave only the last."""


@dataclass(frozen=True)
class Item:
    """One question."""

    context: str
    """The text before; may be empty."""
    alternatives: tuple[tuple[str, ...], ...]
    """Ways to go on, each in parts that are encoded by themselves; the first is the true one."""
    suffix: str = ""
    """The text after, the same for each."""

    def as_json(self) -> dict[str, Any]:
        """The item for people and other programs."""
        texts = ["".join(parts) for parts in self.alternatives]
        return {"context": self.context, "true": texts[0], "false": texts[1:], "suffix": self.suffix}


@dataclass(frozen=True)
class Scored:
    """What a model made of some items."""

    is_right: NDArray[np.bool_]
    """For each item whether the true alternative has the highest score; a tie is wrong."""
    is_encodable: NDArray[np.bool_]
    """False where the tokenizer cannot encode a part by itself: the item counts for no model."""
    num_unknown: int = 0
    """Items with an alternative whose score is not a number: they are wrong."""

    @classmethod
    def of_lists(cls, is_right: list[bool], is_encodable: list[bool]) -> Scored:
        """What a cache gives back."""
        return cls(np.array(is_right, np.bool_), np.array(is_encodable, np.bool_))

    def accuracy(self, counted: NDArray[np.bool_]) -> tuple[int, int]:
        """How many of the `counted` items are right, and how many there are."""
        return int(self.is_right[counted].sum()), int(counted.sum())


def section(
    name: str, items: Sequence[Item], scored: Mapping[str, Scored], not_asked: Mapping[str, str], seed: int
) -> Section:
    """Accuracies of models by name, in per cent, on the items that every model's tokenizer can encode.

    `not_asked` are models that cannot answer, each with the reason.
    """
    counted = np.logical_and.reduce([np.ones(len(items), np.bool_), *(each.is_encodable for each in scored.values())])
    num_counted = int(counted.sum())
    accuracies = {
        model: share("accuracy", each.is_right[counted].tolist(), [1] * num_counted) for model, each in scored.items()
    }
    rows = [
        Row(
            model,
            100 * each.value if num_counted else None,
            percent(each.interval(seed)),
            num_counted,
            tuple(_unknown(scored[model])),
        )
        for model, each in accuracies.items()
    ]
    rows += [Row(model, None, notes=(reason,)) for model, reason in not_asked.items()]
    warnings = []
    if num_counted < SMALL_SAMPLE:
        warnings.append(f"{num_counted} items: too few to tell models apart; give more text")
    if num_counted < len(items):
        warnings.append(
            f"{len(items) - num_counted} of {len(items)} items count for no model: some tokenizer would "
            "encode their words otherwise beside other text"
        )
    chance = (
        Baseline("guessing", 100 * float(np.mean([1 / len(item.alternatives) for item in items]))) if items else None
    )
    return Section(
        name,
        "accuracy",
        "%",
        higher_is_better=True,
        rows=tuple(rows),
        differences=tuple(
            PairedDifference(a, b, 100 * (one.value - other.value), percent(one.difference(other, seed)))
            for (a, one), (b, other) in combinations(accuracies.items(), 2)
            if num_counted
        ),
        baselines=(chance,) if chance else (),
        warnings=tuple(warnings),
        facts={
            "items": len(items),
            "counted": num_counted,
            "seed": seed,
            "examples": [item.as_json() for item in items[:6]],
        },
        digits=1,
    )


def _unknown(scored: Scored) -> Iterator[str]:
    if scored.num_unknown:
        yield f"{plural(scored.num_unknown, 'item')} without a finite score: wrong"


class ContinuationEncoder:
    """Ids of texts as they stand after other text."""

    def __init__(self, tokenizer: Any, start_id: int):
        """`start_id` is the token that stands before a text."""
        self._tokenizer, self._start_id = tokenizer, start_id
        self._anchors = [(anchor, self._ids(anchor)) for anchor in _ANCHORS]
        self._known: dict[str, list[int] | None] = {}

    def start(self, text: str) -> list[int]:
        """Ids of the beginning of a text, after the start token."""
        return [self._start_id, *self._ids(text)]

    def after(self, text: str) -> list[int] | None:
        """Ids of a text that follows other text; None if they depend on what is before."""
        if text not in self._known:
            together = ((before, self._ids(anchor + text)) for anchor, before in self._anchors)
            apart = (ids[len(before) :] for before, ids in together if ids[: len(before)] == before)
            self._known[text] = next(filter(None, apart), None)
        return self._known[text]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids


@dataclass(frozen=True)
class _Sequence:
    item: int
    alternative: int
    ids: list[int]
    scored_from: int
    """Ids before this are the same for each alternative of the item."""


def score(model: LoadedModel, items: Sequence[Item], start_id: int, label: str, batch_tokens: int = 2048) -> Scored:
    """Score every alternative of every item, each text after `start_id`; `batch_tokens` bounds the memory of a batch.

    A context that is longer than the model's loses its beginning, the same for each alternative.
    """
    encoder = ContinuationEncoder(model.tokenizer, start_id)
    scores = [[-np.inf] * len(item.alternatives) for item in items]
    limit = model.context_length
    encoded = [_encoded(number, item, encoder, limit) for number, item in enumerate(items)]
    rows = sorted((row for item in encoded for row in item or ()), key=lambda row: len(row.ids))
    with Progress(label, sum(len(row.ids) for row in rows), "tok") as progress, torch.inference_mode():
        for batch in _batches(rows, batch_tokens):
            for row, value in zip(batch, _log_probabilities(model.model, batch), strict=True):
                scores[row.item][row.alternative] = value
            progress.advance(sum(len(row.ids) for row in batch))
    is_encodable = np.array([item is not None for item in encoded], dtype=np.bool_)
    is_unknown = np.array([np.isnan(values).any() for values in scores], dtype=np.bool_)
    is_right = np.array([values[0] > max(values[1:]) for values in scores], dtype=np.bool_)
    return Scored(is_right & is_encodable & ~is_unknown, is_encodable, int(is_unknown.sum()))


def _encoded(number: int, item: Item, encoder: ContinuationEncoder, limit: int) -> list[_Sequence] | None:
    suffix = encoder.after(item.suffix) if item.suffix else []
    parts = [[encoder.after(part) for part in alternative] for alternative in item.alternatives]
    if suffix is None or any(part is None for alternative in parts for part in alternative):
        return None
    continuations = [[token for part in alternative for token in part or ()] for alternative in parts]
    room = limit - max(map(len, continuations)) - 1
    if room < 1:
        return None
    context = encoder.start(item.context)[-room:]
    suffix = suffix[: room - len(context)]
    return [
        _Sequence(number, place, [*context, *ids, *suffix], len(context)) for place, ids in enumerate(continuations)
    ]


def _batches(rows: list[_Sequence], batch_tokens: int) -> list[list[_Sequence]]:
    """Rows by rising length, so that padding is rare, as many at once as `batch_tokens` holds."""
    batches: list[list[_Sequence]] = []
    for row in rows:
        if not batches or len(row.ids) * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def _log_probabilities(model: Any, rows: list[_Sequence]) -> list[float]:
    """Sum of the log-probabilities of each row's ids from `scored_from` on, in double precision."""
    lengths = [len(row.ids) for row in rows]
    longest = max(lengths)
    ids_BS = torch.tensor([row.ids + [0] * (longest - len(row.ids)) for row in rows], device=model.device)
    positions_S = torch.arange(longest, device=model.device)
    mask_BS = positions_S < torch.tensor(lengths, device=model.device)[:, None]
    logits_BSV = model(input_ids=ids_BS, attention_mask=mask_BS.long()).logits
    scored_from_B = torch.tensor([row.scored_from for row in rows], device=model.device)
    is_scored_BS = (mask_BS & (positions_S >= scored_from_B[:, None]))[:, 1:]
    # Of the scored positions alone: most of a batch is context, and all its logits in fp32 would double the memory.
    logits_NV, labels_N = logits_BSV[:, :-1][is_scored_BS].float(), ids_BS[:, 1:][is_scored_BS]
    nats_N = torch.nn.functional.cross_entropy(logits_NV, labels_N, reduction="none").double()
    nats_BS = torch.zeros(is_scored_BS.shape, dtype=torch.float64, device=model.device)
    nats_BS[is_scored_BS] = nats_N
    sums: list[float] = (-nats_BS.sum(dim=1)).tolist()
    return sums
