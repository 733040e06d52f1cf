"""The report's numbers against counts by hand, for SentencePiece and for what Hugging Face's tokenizers make."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from toy_tokenizers import TrainToy, byte_ids

from zerokara.progress import Progress, bytes_text
from zerokara.tokenizer import report, report_page
from zerokara.tokenizer import report_measures as measuring
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.model_file import ModelFile
from zerokara.tokenizer.morphemes import Analyser
from zerokara.tokenizer.report_measures import count_words
from zerokara.tokenizer.report_tokenizers import open_tokenizer
from zerokara.tokenizer.sampling import SourceTexts

TEXTS = ["the quick fox\n今日はとてもよい天気です。", "rare 龘 and ▁ mark\n\n", "오늘 날씨가 좋아서 42"]
LINES = [line for text in TEXTS for line in text.split("\n")]


def measured(model: Path, texts: list[str]) -> measuring.Measures:
    return measuring.measure(open_tokenizer(model), texts)[0]


def test_measures_equal_a_count_by_hand(toy: Encoder) -> None:
    class Counting(Progress):
        total_advanced = 0.0

        def advance(self, amount: float = 1) -> None:
            self.total_advanced += amount

    progress, tokenizer = Counting("measuring"), open_tokenizer(toy.model_path)
    measures = measuring.measure(tokenizer, TEXTS, progress)[0]
    assert progress.total_advanced == measures.bytes - measures.line_end_tokens
    ids = [i for text in TEXTS for i in toy.encode(text).tolist()]
    assert measures.tokens == len(ids) and measures.lines == 6
    assert measures.characters == sum(map(len, TEXTS))
    assert measures.bytes == sum(len(text.encode()) for text in TEXTS)
    assert measures.byte_tokens == sum(i in byte_ids(toy) for i in ids) >= 3
    assert measures.unknown_tokens == measures.unknown_characters == 0
    assert measures.line_end_tokens == ids.count(toy.newline_id) == 3
    others = [toy.piece(i) for i in ids if i not in byte_ids(toy) and i != toy.newline_id]
    assert measures.character_tokens == sum(len(piece) == 1 for piece in others) > 0
    assert measures.piece_tokens == sum(len(piece) > 1 for piece in others) > 0
    assert (measures.round_trip_failures, measures.failure_examples) == (1, ["rare 龘 and ▁ mark"])
    rates = measures.rates()
    assert rates["bytes_per_token"] == measures.bytes / len(ids)
    assert rates["byte_fallback_rate"] == measures.byte_tokens / len(ids)
    parts = [measuring.measure(tokenizer, [text])[0] for text in TEXTS]
    assert measuring.total(parts) == measures != measuring.total(parts[:2])


def test_unknown_tokens_are_counted_and_the_characters_under_them(train_toy: TrainToy) -> None:
    measures = measured(train_toy(byte_fallback=False), ["龘靐 the 龘", "fox"])
    assert measures.unknown_tokens == 2, "SentencePiece makes one token of a run"
    assert (measures.unknown_characters, measures.round_trip_failures) == (3, 1)


def test_coverage_equals_a_count_by_hand(toy: Encoder) -> None:
    tokenizer = open_tokenizer(toy.model_path)
    _, used = measuring.measure(tokenizer, ["the the the fox", "今日 今日"])
    counts = Counter(i for line in ("the the the fox", "今日 今日") for i in toy.encode(line).tolist())
    spelt = {i: count * len(toy.piece(i).replace("▁", " ").encode()) for i, count in counts.items()}
    order = sorted(counts, key=lambda i: (-counts[i], i))
    points = measuring.coverage(tokenizer, used)
    assert points[0]["pieces"] == 1 and points[-1]["pieces"] == len(counts)
    for point in points:
        first = order[: int(point["pieces"])]
        assert point["share_of_tokens"] == sum(counts[i] for i in first) / counts.total()
        assert point["share_of_text"] == sum(spelt[i] for i in first) / sum(spelt.values())
    assert measuring.coverage(tokenizer, np.zeros_like(used)) == []


def test_a_large_sample_is_counted_at_some_lines(toy: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("the fox\ndogs 42\n" * 10, encoding="utf-8")
    tokenizer = open_tokenizer(toy.model_path)
    whole, half = (np.zeros(toy.vocab_size, dtype=np.int64) for _ in range(2))
    assert measuring.count_sample(tokenizer, sentences, whole, Progress("counting")) == 140
    assert whole.sum() == 10 * sum(len(toy.encode(line)) for line in ("the fox", "dogs 42"))
    monkeypatch.setattr(measuring, "MAX_USAGE_BYTES", 100)
    assert measuring.count_sample(tokenizer, sentences, half, Progress("counting")) == 70, "every second line"
    assert half.sum() == 10 * len(toy.encode("the fox"))


def test_example_lines_are_words_of_middling_length() -> None:
    good = [f"line {'word ' * 10}{letter}" for letter in "abcdefgh"]
    texts = ["\n".join(["", "short", "=" * 60, *good, good[0], "long " * 100])]
    chosen = measuring.example_lines(texts, 4)
    assert chosen == [good[1], good[3], good[5], good[7]]
    assert measuring.example_lines(["one\n\n=="], 4) == ["one"]
    assert measuring.example_lines(["=="], 4) == ["=="] and measuring.example_lines(["\n "], 4) == []
    cut = measuring.example_lines(["long " * 100], 4)
    assert cut == [("long " * 36).rstrip()] and len(cut[0]) <= measuring.EXAMPLE_CHARACTERS
    assert [len(line) for line in measuring.example_lines(["字" * 500], 1)] == [measuring.EXAMPLE_CHARACTERS]


def _make(toy: Encoder, tmp_path: Path, *compare_with: Path) -> report.Report:
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("the fox\nthe dogs\n", encoding="utf-8")
    sources = [SourceTexts(TEXTS, True), SourceTexts(["the fox"], False)]
    names = [str(path) for path in compare_with]
    return report.make(toy.model_path, ["a.jsonl", "b.jsonl"], sources, sentences, {"k": 1}, names)


def test_the_whole_report(toy: Encoder, toy_bpe: Encoder, tmp_path: Path) -> None:
    name = str(toy_bpe.model_path)
    made = _make(toy, tmp_path, toy_bpe.model_path)
    assert [source.measured_on for source in made.sources] == ["held-out text", "text offered to the training"]
    assert list(made.sources[0].tokenizers) == ["this one", name]
    assert made.sources[0].tokenizers[name].tokens == sum(len(toy_bpe.encode(text)) for text in TEXTS)
    assert made.all_sources["this one"].tokens == sum(len(toy.encode(text)) for text in [*TEXTS, "the fox"])
    bpe = {"description": "SentencePiece BPE, byte fallback", "vocab_size": toy_bpe.vocab_size}
    assert made.tokenizers["this one"]["description"] == "SentencePiece unigram, byte fallback"
    assert made.tokenizers[name] == bpe

    counts = Counter(toy.piece(i) for line in [*LINES, "the fox", "the dogs"] for i in toy.encode(line).tolist())
    assert dict(made.most_frequent) == dict(counts) or len(made.most_frequent) == 50
    assert all(counts[piece] == count for piece, count in [*made.most_frequent, *made.longest])
    assert made.most_frequent[0][1] == max(counts.values()) and made.usage_tokens == counts.total()
    learnt = [piece.text for piece in ModelFile(toy.model_bytes).pieces if piece.type == 1]
    assert set(made.unused_pieces) == {piece for piece in learnt if not counts[piece]}
    assert made.num_learnt_pieces == len(learnt)
    assert [len(piece) for piece, _ in made.longest] == sorted(map(len, learnt), reverse=True)[:50]
    lengths = Counter(map(len, [*learnt, "\n"]))
    assert {each["characters"]: each["pieces"] for each in made.piece_lengths if each["pieces"]} == dict(lengths)
    assert made.piece_lengths[0]["tokens"] == sum(count for piece, count in counts.items() if len(piece) == 1)

    as_json, as_text = made.as_json(), report_page.text(made)
    assert as_json["sources"][0]["tokenizers"]["this one"]["characters_per_token"] > 0
    assert as_json["num_unused_pieces"] == len(made.unused_pieces) and as_json["sample"] == {"k": 1}
    assert "a.jsonl (held-out text" in as_text and "b.jsonl (text offered to the training" in as_text
    assert "changed by this one: 'rare 龘 and ▁ mark'" in as_text and len(made.rows()) == 4
    for one in [*made.sources[0].tokenizers.values(), *made.all_sources.values()]:
        rates = one.rates()
        assert f"{one.tokens:,}" in as_text and f"{rates['bytes_per_token']:.3f}" in as_text
        assert f"{rates['byte_fallback_rate']:.4%}" in as_text
    assert f"{made.usage_tokens:,}" in as_text and bytes_text(made.usage_bytes) in as_text
    example = as_json["sources"][0]["examples"][0]
    assert "".join(cell["text"] for cell in example["tokenizers"]["this one"]) == example["line"]


def test_nothing_to_measure_is_no_fault(toy: Encoder, tmp_path: Path) -> None:
    sentences = tmp_path / "sentences.txt"
    sentences.write_bytes(b"")
    for sources in ([], [SourceTexts(["", "\n\n"], True), SourceTexts([], True)]):
        made = report.make(toy.model_path, ["a.txt", "b.txt"][: len(sources)], sources, sentences, {})
        assert made.usage_bytes == len(sources) and ("no text" in made.verdict) == (not sources)
        assert len(made.unused_pieces) == made.num_learnt_pieces > 0 and made.most_frequent == []
        assert all(each["tokens"] == 0 for each in made.piece_lengths)
        assert "never used" in report_page.text(made) and orjson.dumps(made.as_json())
        assert "not used" in report_page.page(made) and len(made.rows()) == len(sources)


def test_words_are_counted_where_they_can_be_told_apart() -> None:
    assert count_words(["the quick fox\njumps  over", "a 日本 b"]) == 8
    assert count_words(["오늘 날씨가 좋아서"]) == 3
    assert count_words([]) == count_words([" \n"]) == 0
    assert count_words(["今日はとてもよい天気です。", "the fox"]) is None
    by_two = Analyser("two", "ja", "", lambda: lambda text: [(i, i + 2) for i in range(0, len(text), 2)])
    assert count_words(["今日はよい\n\n天気"], by_two) == 4
    assert count_words(["今天天气很好"], by_two) is None, "it is for Japanese"
    assert count_words(["the quick fox"], by_two) == 3
    assert count_words(["今日はよい"], replace(by_two, language="ko")) is None


def test_tokens_per_word_leave_out_line_ends(toy: Encoder) -> None:
    measures = measured(toy.model_path, ["the fox\nthe dogs"])
    assert measures.tokens_per_word is None
    measures.words = 4
    assert measures.tokens_per_word == (measures.tokens - 1) / 4 == measures.rates()["tokens_per_word"]
    japanese = measuring.Measures(tokens=5)
    assert measuring.total([measures, japanese]).words is None and measuring.total([measures, measures]).words == 8


def test_the_verdict_compares_the_lossless(toy: Encoder, toy_bpe: Encoder, train_toy: TrainToy, tmp_path: Path) -> None:
    alone = _make(toy, tmp_path)
    ours = alone.all_sources["this one"]
    assert f"{ours.rates()['bytes_per_token']:.3f}" in alone.verdict and "compare_with" in alone.verdict
    lossy, same = train_toy(byte_fallback=False, normalization_rule_name="nfkc_cf"), tmp_path / "same.model"
    same.write_bytes(toy.model_bytes)
    made = _make(toy, tmp_path, toy_bpe.model_path, lossy, same)
    for measures in made.all_sources.values():  # one line of the toy text changes with all of them
        measures.round_trip_failures -= 1
    difference = ours.tokens / made.all_sources[str(toy_bpe.model_path)].tokens - 1
    assert f"{abs(difference):.0%} {'more' if difference > 0 else 'fewer'} tokens than" in made.verdict
    assert "as many tokens as same.model" in made.verdict and "Not comparable" in made.verdict


def test_names_are_short_where_that_tells_them_apart() -> None:
    names = ["x/one.jsonl", "y/one.jsonl", "z/two.jsonl", "gpt/tokenizer.json", "hf", "tokenizer.json"]
    short = ["x/one.jsonl", "y/one.jsonl", "two.jsonl", "gpt", "hf", "tokenizer.json"]
    assert report._labels(names) == dict(zip(names, short, strict=True))
