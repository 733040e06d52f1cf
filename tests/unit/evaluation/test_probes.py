"""Minimal pairs and cloze: fair by construction in any script, and at chance for a model that knows nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from made_models import causal_model, spaced, tokenizer_of, unspaced

from zerokara.evaluation import choices, cloze, minimal_pairs
from zerokara.evaluation.choices import Item
from zerokara.evaluation.words import Sentence, sentences

NUM_ITEMS = 400


class Unigram:
    """A model that knows how frequent each token is, and nothing of the text before it."""

    device = torch.device("cpu")
    context_length = 512

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.model = tokenizer, self
        self._logits = torch.randn(len(tokenizer), generator=torch.Generator().manual_seed(0)) * 3

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self._logits.expand(*input_ids.shape, -1))


def score(model: Any, items: list[Item], label: str, batch_tokens: int = 2048) -> choices.Scored:
    return choices.score(model, items, model.tokenizer.eos_token_id, label, batch_tokens)


@pytest.mark.parametrize("documents", [spaced, unspaced])
def test_a_model_that_knows_no_context_has_exactly_the_share_of_guessing(documents: Callable[[], list[str]]) -> None:
    """Whatever it thinks of single words: each is the true one as often as it is offered in another's place."""
    texts = documents()
    tokenizer = tokenizer_of(texts)
    model = Unigram(tokenizer)
    pairs, asked = minimal_pairs.make(texts, NUM_ITEMS, 0)["word"], cloze.make(texts, NUM_ITEMS, 0)
    assert len(pairs) > 100 and len(asked) > 30
    of_pairs, of_cloze = (score(model, items, "probe") for items in (pairs, asked))
    assert of_pairs.is_encodable.all() and of_cloze.is_encodable.all()
    assert of_pairs.accuracy(of_pairs.is_encodable) == (len(pairs) // 2, len(pairs))
    assert of_cloze.accuracy(of_cloze.is_encodable) == (len(asked) // cloze.NUM_ALTERNATIVES, len(asked))
    # Half of each couple by itself is a comparison of the words' frequencies, which such a model has learned.
    frequent = [
        item
        for item in pairs
        if loglik(model, tokenizer, item.alternatives[0]) > loglik(model, tokenizer, item.alternatives[1])
    ]
    assert score(model, frequent, "probe").is_right.all() and len(frequent) == len(pairs) // 2


def loglik(model: Unigram, tokenizer: Any, parts: tuple[str, ...]) -> float:
    encoder, scores = choices.ContinuationEncoder(tokenizer, 0), model._logits.log_softmax(0).double()
    return sum(float(scores[encoder.after(part) or []].sum()) for part in parts)


@pytest.mark.parametrize("documents", [spaced, unspaced])
def test_random_weights_score_chance_within_the_interval(documents: Callable[[], list[str]]) -> None:
    from zerokara.evaluation.intervals import wilson

    texts = documents()
    model, tokenizer = causal_model(texts)
    asked = SimpleNamespace(model=model, tokenizer=tokenizer, context_length=1024)
    found = {**minimal_pairs.make(texts, NUM_ITEMS, 0), "cloze": cloze.make(texts, NUM_ITEMS, 0)}
    for kind, items in found.items():
        scored = score(asked, items, kind)
        interval = wilson(*scored.accuracy(scored.is_encodable))
        share = 1 / len(items[0].alternatives)
        assert interval.low < share < interval.high, (kind, interval)
    if documents is unspaced:
        # Encoded in one go, the true text has fewer tokens, which alone would tell it.
        wholes = [
            [len(tokenizer(item.context + "".join(parts) + item.suffix)["input_ids"]) for parts in item.alternatives]
            for item in found["order"]
        ]
        unequal = [lengths for lengths in wholes if lengths[0] != lengths[1]]
        assert wilson(sum(true < false for true, false in unequal), len(unequal)).low > 0.6


@pytest.mark.parametrize("documents", [spaced, unspaced])
def test_items_are_the_same_for_a_seed_and_keep_what_they_promise(documents: Callable[[], list[str]]) -> None:
    texts = documents()
    pairs = minimal_pairs.make(texts, NUM_ITEMS, 5)
    assert pairs == minimal_pairs.make(texts, NUM_ITEMS, 5) != minimal_pairs.make(texts, NUM_ITEMS, 6)
    asked = cloze.make(texts, NUM_ITEMS, 5)
    assert asked == cloze.make(texts, NUM_ITEMS, 5) != cloze.make(texts, NUM_ITEMS, 6)
    corpus = "\n".join(texts)
    for item in [*pairs["order"], *pairs["word"], *asked]:
        assert item.context + "".join(item.alternatives[0]) + item.suffix in corpus
        assert len(set(item.alternatives)) == len(item.alternatives)
    for item in pairs["order"]:
        assert item.alternatives[1] == item.alternatives[0][::-1]
    for one, other in zip(pairs["word"][::2], pairs["word"][1::2], strict=True):
        assert one.alternatives == other.alternatives[::-1]
        assert len({len("".join(parts)) for parts in one.alternatives}) == 1
    for start in range(0, len(asked), 4):
        block = asked[start : start + 4]
        assert len({item.alternatives[0] for item in block}) == 4 == len(block)
        assert len({frozenset(item.alternatives) for item in block}) == 1
    assert max(Counter(item.alternatives[0] for item in pairs["word"]).values()) <= 4


def test_a_model_that_knows_the_text_is_right() -> None:
    """One that was told which pairs of neighbouring tokens occur, and so finds the true order and the true word."""
    texts = ["the cat sat on a mat and ate."] * 3
    tokenizer = tokenizer_of(texts)
    seen = torch.zeros(len(tokenizer), len(tokenizer))
    ids = [tokenizer.eos_token_id, *tokenizer(texts[0])["input_ids"]]
    for before, after in pairwise(ids):
        seen[before, after] = 10

    class Bigram(Unigram):
        def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return SimpleNamespace(logits=seen[input_ids])

    items = [
        Item("the cat", ((" sat", " on"), (" on", " sat")), " a mat."),
        Item("the", ((" cat",), (" mat",)), " sat"),
        Item("the", ((" mat",), (" cat",)), " sat"),
        Item("", (("the",), ("mat",)), ""),
    ]
    scored = score(Bigram(tokenizer), items, "probe", batch_tokens=1)
    assert scored.is_right.tolist() == [True, True, False, True] and scored.is_encodable.all()
    together = score(Bigram(tokenizer), items, "probe")
    assert (together.is_right == scored.is_right).all()


def test_a_long_context_loses_its_beginning_alike() -> None:
    tokenizer = tokenizer_of(["abc abd " * 20])
    lengths = []

    class Short(Unigram):
        context_length = 12

        def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            lengths.append(input_ids.shape[1])
            return super().__call__(input_ids, attention_mask)

    score(Short(tokenizer), [Item("abd abc " * 40, ((" x y z",), (" abc",)), " ab" * 30)], "probe")
    assert max(lengths) <= 12


def test_an_item_that_one_tokenizer_cannot_take_counts_for_none() -> None:
    items = [Item("", (("a",), ("b",)))] * 3
    one = choices.Scored(np.array([True, False, True]), np.array([True, True, True]))
    other = choices.Scored(np.array([False, True, True]), np.array([False, True, True]))
    made = choices.section("cloze", items, {"one": one, "other": other}, {"t5": "an encoder-decoder"}, seed=0)
    rows = {row.model: row for row in made.rows}
    assert (rows["one"].value, rows["other"].value, rows["one"].n) == (50.0, 100.0, 2)
    assert rows["one"].interval is not None and 9 < rows["one"].interval.low < 50 < rows["one"].interval.high < 91
    assert rows["t5"].value is None and rows["t5"].notes == ("an encoder-decoder",)
    (difference,) = made.differences
    assert (difference.a, difference.b, difference.difference) == ("one", "other", -50.0)
    assert made.baselines[0].value == 50.0 and made.facts["items"] == 3 and made.facts["counted"] == 2
    assert made.metric == "accuracy" and made.unit == "%" and made.warnings


def test_a_score_that_is_no_number_is_wrong_and_named() -> None:
    tokenizer = tokenizer_of(["abc abd " * 20])
    model = Unigram(tokenizer)
    model._logits[:] = torch.nan
    items = [Item("abd", ((" abc",), (" abd",)))] * 2
    scored = score(model, items, "probe")
    assert not scored.is_right.any() and scored.num_unknown == 2
    (row,) = choices.section("cloze", items, {"one": scored}, {}, seed=0).rows
    assert row.value == 0 and row.notes == ("2 items without a finite score: wrong",)


def test_too_little_text_is_told() -> None:
    made = choices.section("cloze", [], {}, {}, seed=0)
    assert made.rows == () and made.baselines == () and made.warnings


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Don't stop well-known bugs, OK?", ["Don't", "stop", "well-known", "bugs", "OK"]),
        ("Ce-i „aici”: învăță!", ["Ce-i", "aici", "învăță"]),
        ("私は東京でコーヒーを飲んだ。", ["私", "は", "東京", "で", "コーヒー", "を", "飲", "んだ"]),
        ("我爱北京。", ["我", "爱", "北", "京"]),
        ("ภาษาไทย", ["ภ", "า", "ษ", "า", "ไ", "ท", "ย"]),
        ("영화가 재미있다!", ["영화가", "재미있다"]),
        ("Pythonで書く", ["Python", "で", "書", "く"]),
    ],
)
def test_words_of_any_script(line: str, expected: list[str]) -> None:
    (sentence,) = sentences([line])
    assert [sentence.word(number) for number in range(len(sentence.words))] == expected


def test_sentences_end_at_stops_and_line_ends() -> None:
    document = "One 3.5 two. Three!\n\n  Four “five.” Six\n七。八！」九"
    found = [sentence.text for sentence in sentences([document])]
    assert found == ["One 3.5 two.", "Three!", "Four “five.”", "Six", "七。", "八！」", "九"]
    assert Sentence(document, 0, 3).words == [(0, 3)]
