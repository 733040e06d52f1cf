"""The report's numbers against counts by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from zerokara.errors import UserError
from zerokara.tokenizer import report
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.model_file import ModelFile
from zerokara.tokenizer.sampling import SourceTexts

TEXTS = ["the quick fox\n今日はとてもよい天気です。", "rare 龘 and ▁ mark\n\n", "오늘 날씨가 좋아서 42"]


def test_measures_equal_a_count_by_hand(toy: Encoder) -> None:
    measures = report.measure(report.open_model(toy.model_path), TEXTS, None)
    ids = [i for text in TEXTS for i in toy.encode(text).tolist()]
    assert measures.tokens == len(ids)
    assert measures.characters == sum(map(len, TEXTS))
    assert measures.bytes == sum(len(text.encode()) for text in TEXTS)
    assert measures.lines == 6
    assert measures.byte_tokens == sum(i in toy.byte_ids for i in ids) >= 3
    assert measures.unknown_tokens == 0
    assert measures.round_trip_failures == 1
    assert measures.failure_examples == ["rare 龘 and ▁ mark"]
    rates = measures.rates()
    assert rates["bytes_per_token"] == measures.bytes / len(ids)
    assert rates["byte_fallback_rate"] == measures.byte_tokens / len(ids)


def test_unknown_tokens_are_counted(train_toy: Callable[..., Path]) -> None:
    model = report.open_model(train_toy(byte_fallback=False))
    measures = report.measure(model, ["龘 the 龘", "fox"], None)
    assert measures.unknown_tokens == 2
    assert measures.round_trip_failures == 1


def test_the_whole_report(toy: Encoder, toy_bpe: Encoder, tmp_path: Path) -> None:
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("the fox\nthe dogs\n", encoding="utf-8")
    sources = [SourceTexts(TEXTS, True), SourceTexts(["the fox"], False)]
    made = report.make(toy.model_path, ["a.jsonl", "b.jsonl"], sources, sentences, {"k": 1}, [str(toy_bpe.model_path)])
    assert [source.measured_on for source in made.sources] == ["held-out text", "text offered to the training"]
    assert list(made.sources[0].measures) == ["this one", str(toy_bpe.model_path)]
    bpe_tokens = sum(len(toy_bpe.encode(text)) for text in TEXTS)
    assert made.sources[0].measures[str(toy_bpe.model_path)].tokens == bpe_tokens

    lines = [line for text in TEXTS for line in text.split("\n")] + ["the fox", "the dogs"]
    counts = Counter(toy.piece(i) for line in lines for i in toy.encode(line).tolist())
    assert dict(made.most_frequent) == dict(counts) or len(made.most_frequent) == 50
    assert all(counts[piece] == count for piece, count in made.most_frequent)
    assert made.most_frequent[0][1] == max(counts.values())
    learnt = [piece.text for piece in ModelFile(toy.model_bytes).pieces if piece.kind == 1]
    assert set(made.unused_pieces) == {piece for piece in learnt if not counts[piece]}
    assert len(made.longest) == 50 and len(made.longest[0]) == max(map(len, learnt))

    as_json, as_text = made.as_json(), made.as_text()
    assert as_json["sources"][0]["tokenizers"]["this one"]["characters_per_token"] > 0
    assert as_json["num_unused_pieces"] == len(made.unused_pieces) and as_json["sample"] == {"k": 1}
    assert "a.jsonl (held-out text" in as_text and "b.jsonl (text offered to the training" in as_text
    assert "changed: 'rare 龘 and ▁ mark'" in as_text
    assert len(made.rows()) == 4


def test_a_file_to_compare_with_that_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"other\.model: is not a SentencePiece model that can be read"):
        report.open_model(tmp_path / "other.model")
