"""Programs of benchmarks/: what the measures of the contest and of deduplication count, what nanochat reads."""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_data
from torch import Tensor

from benchmarks.cleaning.deduplication import judged
from benchmarks.recipe import score
from benchmarks.recipe.corpus import prepare
from benchmarks.recipe.nanochat import pieces_of
from benchmarks.training import step
from zerokara.tokenizer.encoder import Encoder


@pytest.mark.parametrize("num_ids", [1, 3, 4, 5, 6, 7, 8, 30])
@pytest.mark.parametrize("restarts", [False, True])
def test_each_id_is_predicted_once_from_at_least_half_a_context(num_ids: int, restarts: bool) -> None:
    ids, context, begin = list(range(1, num_ids + 1)), 4, 0
    found = []
    for window in score.windows(ids, begin, context, restarts):
        assert len(window.inputs) == len(window.targets) == context
        assert not restarts or window.inputs[0] == begin
        for position, target in enumerate(window.targets):
            if target >= 0:
                found.append(target)
                assert window.inputs[position] in (target - 1, begin)
                assert position + 1 >= min(target, context // 2)
    assert found == ids


DOCUMENTS = [{"text": "naïve 日本", "ids": [3, 4, 5, 6, 7]}, {"text": "b", "ids": [3]}]


def test_a_model_that_knows_nothing_needs_the_bits_of_its_vocabulary() -> None:
    found = score.score(lambda ids: torch.zeros(*ids.shape, 8), DOCUMENTS, 1, 4)
    num_bytes = len("naïve 日本b".encode())
    assert found["bytes"] == num_bytes and found["ids"] == 6
    assert found["stream"] == pytest.approx(6 * math.log2(8) / num_bytes)
    assert found["begin"] == pytest.approx(found["stream"])


def test_only_the_ids_of_texts_are_counted() -> None:
    """A model that is sure that each id is followed by the next one is wrong about the first ids only."""

    def successor(ids: Tensor) -> Tensor:
        return 50.0 * torch.nn.functional.one_hot((ids + 1) % 8, 8)

    found = score.score(successor, DOCUMENTS, 2, 4)
    assert found["stream"] == pytest.approx(0, abs=1e-9)
    wrong = score.score(successor, DOCUMENTS, 1, 4)
    assert wrong["stream"] == pytest.approx(2 * 50 / math.log(2) / wrong["bytes"], rel=1e-3)
    assert wrong["begin"] == pytest.approx(wrong["stream"]), "nothing is scored right behind the begin of a window"


def test_the_contenders_of_a_step_begin_with_drawn_weights(tmp_path: Path) -> None:
    smaller = ["num_layers=1", "hidden_size=64", "num_attn_heads=2", "num_kv_heads=2", "ffn_hidden_size=64"]
    given = argparse.Namespace(precision="fp32", set=smaller, batch=0, rounds=1, vocab_size=100)
    weights = torch.load(step.make_task(given, tmp_path).weights)
    assert [*weights] and all(
        weight.eq(1).all() if "layernorm" in name else 0.01 < weight.std() < 0.2 for name, weight in weights.items()
    )


def test_everybody_gets_the_documents_of_step_2_and_nanochat_loses_no_token(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    corpus = prepare(Path(data["config"]), tmp_path / "prepared", 64)

    def texts(path: Path) -> list[str]:
        return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").split("\n")[:-1]]

    train, heldout = texts(corpus.train_texts), texts(corpus.heldout_texts)
    assert heldout == texts(corpus.heldout) and train and heldout
    assert sorted(train + heldout) == sorted(texts(Path(data["input_jsonl"])))
    encoder, ids = Encoder(corpus.tokenizer), np.load(corpus.train_ids)
    expected = [number for text in train for number in (*encoder.encode(text), corpus.eos_id)]
    assert sorted(ids.tolist()) == sorted(expected)

    pieces = pieces_of(corpus, 64)
    assert np.concatenate(pieces).tolist() == ids[ids != corpus.eos_id].tolist()
    assert max(map(len, pieces)) <= 64 and min(map(len, pieces)) > 0


def test_what_was_found_lost_and_dropped_without_reason_is_counted() -> None:
    pairs = [(0, 1, 1.0, False), (2, 3, 0.9, True), (4, 5, 0.1, False), (6, 7, None, False)]
    keys = ("original", "copy", "jaccard", "unspaced")
    truth = {"documents": 10, "pairs": [dict(zip(keys, pair, strict=True)) for pair in pairs]}
    found = judged({0, 1, 3, 5, 7}, truth)
    assert found["false merges, %"] == 25 and found["lost pairs, %"] == pytest.approx(100 / 3)
    assert found["found of 1 0.85–1 without spaces, %"] == found["found of 1 equal with spaces, %"] == 100
    assert found["found of 1 under 0.6 with spaces, %"] == 100
    assert judged(set(), truth)["found of 1 equal with spaces, %"] == 0
