"""Programs of benchmarks/: what the measure of recipe.py counts, what nanochat reads, what tables and pages say."""

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_data
from torch import Tensor

from zerokara.tokenizer.encoder import Encoder


@pytest.mark.parametrize("num_ids", [1, 3, 4, 5, 6, 7, 8, 30])
@pytest.mark.parametrize("restarts", [False, True])
def test_each_id_is_predicted_once_from_at_least_half_a_context(module_of: Any, num_ids: int, restarts: bool) -> None:
    ids, context, begin = list(range(1, num_ids + 1)), 4, 0
    found = []
    for window in module_of("recipe_score").windows(ids, begin, context, restarts):
        assert len(window.inputs) == len(window.targets) == context
        assert not restarts or window.inputs[0] == begin
        for position, target in enumerate(window.targets):
            if target >= 0:
                found.append(target)
                assert window.inputs[position] in (target - 1, begin)
                assert position + 1 >= min(target, context // 2)
    assert found == ids


DOCUMENTS = [{"text": "naïve 日本", "ids": [3, 4, 5, 6, 7]}, {"text": "b", "ids": [3]}]


def test_a_model_that_knows_nothing_needs_the_bits_of_its_vocabulary(module_of: Any) -> None:
    found = module_of("recipe_score").score(lambda ids: torch.zeros(*ids.shape, 8), DOCUMENTS, 1, 4)
    num_bytes = len("naïve 日本b".encode())
    assert found["bytes"] == num_bytes and found["ids"] == 6
    assert found["stream"] == pytest.approx(6 * math.log2(8) / num_bytes)
    assert found["begin"] == pytest.approx(found["stream"])


def test_only_the_ids_of_texts_are_counted(module_of: Any) -> None:
    """A model that is sure that each id is followed by the next one is wrong about the first ids only."""

    def successor(ids: Tensor) -> Tensor:
        return 50.0 * torch.nn.functional.one_hot((ids + 1) % 8, 8)

    found = module_of("recipe_score").score(successor, DOCUMENTS, 2, 4)
    assert found["stream"] == pytest.approx(0, abs=1e-9)
    wrong = module_of("recipe_score").score(successor, DOCUMENTS, 1, 4)
    assert wrong["stream"] == pytest.approx(2 * 50 / math.log(2) / wrong["bytes"], rel=1e-3)
    assert wrong["begin"] == pytest.approx(wrong["stream"]), "nothing is scored right behind the begin of a window"


def result(system: str, seed: int, stream: float, begin: float = 9.0, **more: Any) -> dict[str, Any]:
    common = {"corpus": "english", "size": "3M", "minutes": 10.0, "seq_len": 256, "threads": 2, "precision": "fp32"}
    scores = {"bits_per_byte": {"stream": stream, "begin": begin}}
    return {"key": f"{system}{seed}", "system": system, "seed": seed, **common, **scores, "tokens": 1e6, "steps": 50,
            "seconds": 600.0, **more}  # fmt: skip


def test_the_table_compares_means_with_the_best_other_system(module_of: Any, tmp_path: Path) -> None:
    some = [result("zerokara", 1, 1.50), result("zerokara", 2, 1.54), result("litgpt", 1, 1.70, begin=1.60)]
    some += [result("nanochat", 1, 1.80), result("run_clm", 1, 0)]
    del some[-1]["bits_per_byte"]
    some[-1]["error"] = "exit code 1"
    some.insert(0, result("zerokara", 1, 1.9, key="of an older recipe"))
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in some), encoding="utf-8")
    table = module_of("recipe_table")
    lines = list(table.tables(table.results(tmp_path)))
    rows = [line.split(" | ") for line in lines if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == ["| zerokara", "| litgpt", "| nanochat", "| run_clm"]
    assert rows[1][1] == "1.5200" and rows[1][2] == f"± {12.706 * math.sqrt(2 * 0.02**2) / math.sqrt(2):.4f}"
    assert rows[2][1] == "1.6000", "the better of the two readings"
    assert "exit code 1" in lines[-2] and "failed" in lines[-2]
    assert "5.00% below litgpt" in lines[-1]


def test_everybody_gets_the_documents_of_step_2_and_nanochat_loses_no_token(module_of: Any, tmp_path: Path) -> None:
    data = make_data(tmp_path)
    corpus = module_of("recipe_corpus").prepare(Path(data["config"]), tmp_path / "prepared", 64)

    def texts(path: Path) -> list[str]:
        return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").split("\n")[:-1]]

    train, heldout = texts(corpus.train_texts), texts(corpus.heldout_texts)
    assert heldout == texts(corpus.heldout) and train and heldout
    assert sorted(train + heldout) == sorted(texts(Path(data["input_jsonl"])))
    encoder, ids = Encoder(corpus.tokenizer), np.load(corpus.train_ids)
    expected = [number for text in train for number in (*encoder.encode(text), corpus.eos_id)]
    assert sorted(ids.tolist()) == sorted(expected)

    pieces = module_of("recipe_nanochat").pieces_of(corpus, 64)
    assert np.concatenate(pieces).tolist() == ids[ids != corpus.eos_id].tolist()
    assert max(map(len, pieces)) <= 64 and min(map(len, pieces)) > 0


def test_planted_copies_stand_where_the_truth_says_and_are_as_alike_as_it_says(module_of: Any, tmp_path: Path) -> None:
    chance, maker = np.random.default_rng(1), module_of("clean_corpus_text")
    lines = ("\n".join(" ".join(f"w{n}" for n in chance.integers(0, 500, 12)) for _ in range(9)) for _ in range(200))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in lines), encoding="utf-8")
    truth = maker.make(tmp_path / "made", [tmp_path / "text.jsonl"], 0.6, 1)
    assert truth == json.loads((tmp_path / "made" / "truth.json").read_text(encoding="utf-8"))
    assert truth["bytes"] > 2 * (tmp_path / "text.jsonl").stat().st_size, "some documents are made of pieces"
    assert len(truth["pairs"]) > truth["documents"] / 5
    files = [(tmp_path / "made" / f"{number}.jsonl").read_text(encoding="utf-8").split("\n") for number in range(8)]
    for pair in truth["pairs"]:
        one, other = (json.loads(files[pair[each] % 8][pair[each] // 8]) for each in ("original", "copy"))
        assert (one["id"], other["id"]) == (pair["original"], pair["copy"])
        alike = maker.runs(one["text"]) & maker.runs(other["text"])
        assert pair["jaccard"] == len(alike) / len(maker.runs(one["text"]) | maker.runs(other["text"]))
        assert (one["text"] == other["text"]) == (pair["jaccard"] == 1) or pair["replaced"]


def test_what_was_found_lost_and_dropped_without_reason_is_counted(module_of: Any) -> None:
    pairs = [(0, 1, 1.0, False), (2, 3, 0.9, True), (4, 5, 0.1, False), (6, 7, None, False)]
    keys = ("original", "copy", "jaccard", "unspaced")
    truth = {"documents": 10, "pairs": [dict(zip(keys, pair, strict=True)) for pair in pairs]}
    found = module_of("clean_corpus").judged({0, 1, 3, 5, 7}, truth)
    assert found["false merges, %"] == 25 and found["lost pairs, %"] == pytest.approx(100 / 3)
    assert found["found of 1 0.85–1 without spaces, %"] == found["found of 1 equal with spaces, %"] == 100
    assert found["found of 1 under 0.6 with spaces, %"] == 100
    assert module_of("clean_corpus").judged(set(), truth)["found of 1 equal with spaces, %"] == 0


def test_a_dirty_corpus_has_the_copies_the_lines_and_the_damage_that_it_is_said_to_have(module_of: Any) -> None:
    chance, maker = random.Random(1), module_of("clean_worth_text")
    lines = [" ".join(f"é{chance.randrange(3000)}" for _ in range(40)) for _ in range(9 * 640)]
    texts = ["\n".join(lines[at : at + 9]) for at in range(0, len(lines), 9)]
    documents, of_sites = maker.made_dirty(texts, chance)
    found = Counter(each["of"] for each in documents)
    assert found.keys() == {*range(600)} and 1 - len(found) / len(documents) == pytest.approx(0.3, abs=0.01)
    assert max(found.values()) > 20 and sum(number == 1 for number in found.values()) > 300
    whole = [each for each in documents if not each["damaged"]]
    assert 0 < len(documents) - len(whole) < 30
    for each in documents:
        text = each["text"].encode("cp1252", "replace").decode(errors="replace") if each["damaged"] else each["text"]
        assert ("é" in each["text"]) != each["damaged"]
        own = [line for line in text.split("\n") if line not in of_sites]
        is_same = [one == other for one, other in zip(own, texts[40 + each["of"]].split("\n"), strict=True)]
        words = zip(" ".join(own).split(), texts[40 + each["of"]].split(), strict=True)
        assert all(is_same) or sum(one != other for one, other in words) < 0.1 * 360
    on_sites = sum(each["text"].split("\n")[0] in of_sites for each in whole)
    assert on_sites / len(whole) == pytest.approx(0.7, abs=0.06)
