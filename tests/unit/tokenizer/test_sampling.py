"""The sample: never dropped, within its budget, the same every time, and in memory that was named before."""

import gzip
import random
from pathlib import Path
from typing import Any

import pytest
from configs import fault_of
from corpus_files import write_texts

from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.corpus.find import find_files
from zerokara.tokenizer import sampling, training
from zerokara.tokenizer.sampling import SENTENCE_BYTES, SampleReport, SourceTexts, sentences_of, split_line


def _draw(
    entries: list[str], target: Path, sample_bytes: int = 10_000_000, **settings: Any
) -> tuple[list[SourceTexts], SampleReport]:
    config = TokenizerConfig(input=tuple(entries), **{"seed": 1, **settings})
    return sampling.draw(config, find_files(entries, "config.yaml:1"), target, sample_bytes)


def _documents(count: int, size: int = 400) -> list[str]:
    return [f"document {i}: " + "今日はよい天気です。" * (size // 30) for i in range(count)]


def test_long_documents_are_split_and_not_dropped(tmp_path: Path) -> None:
    without_ends = "語" * 50_000
    texts = ["これは長い文です。" * 3000, "word " * 20_000, without_ends, "Is it? Yes! It is. " * 2000]
    _, report = _draw([write_texts(tmp_path / "a.jsonl", texts)], tmp_path / "s.txt")
    sentences = (tmp_path / "s.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert max(len(sentence.encode()) for sentence in sentences) <= SENTENCE_BYTES
    assert "".join(sentences) == "".join(texts)
    assert report.bytes_used == report.bytes_chosen == report.bytes_offered == sum(len(t.encode()) for t in texts)
    assert report.dropped_bytes == {} and report.documents == 4


def test_a_line_is_cut_at_sentence_ends_then_spaces_then_anywhere() -> None:
    assert split_line("あ。い。う。", 12) == ["あ。い。", "う。"]
    assert split_line("「あ。」い。う。", 18) == ["「あ。」い。", "う。"]
    assert split_line("One. Two. Three.", 10) == ["One. Two.", " Three."]
    assert split_line("3.14 and 2.71", 8) == ["3.14", " and", " 2.71"]
    assert split_line("ああああ", 7) == ["ああ", "ああ"]
    assert split_line("short", 5) == ["short"]


def test_reserved_characters_are_left_out_and_counted(tmp_path: Path) -> None:
    assert list(sentences_of("ab▅cd\n▅\n\nef")) == ["ab", "cd", "ef"]
    _, report = _draw([write_texts(tmp_path / "a.jsonl", ["chart ▁▂▅▇ end"])], tmp_path / "s.txt")
    assert sum(report.dropped_bytes.values()) == 3
    assert report.bytes_used + 3 == report.bytes_chosen


def test_every_document_with_a_space_mark_is_counted(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", [*_documents(300), "one \u2581", "two\u2581\u2581"])
    _, report = _draw([path], tmp_path / "s.txt", sample_bytes=2000)
    assert report.space_marks == 2 and "2 documents hold U+2581" in report.use_text()
    _, report = _draw([path], tmp_path / "s.txt", base_tokenizer="a byte-level one, which keeps it")
    assert report.space_marks == 0 and "U+2581" not in report.use_text()


def test_the_budget_is_kept_and_every_part_of_the_corpus_is_drawn(tmp_path: Path) -> None:
    entries = [write_texts(tmp_path / f"{name}.jsonl", _documents(1000)) for name in "ab"]
    _, report = _draw(entries, tmp_path / "s.txt", sample_bytes=100_000)
    drawn = (tmp_path / "s.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert 98_000 < report.bytes_chosen <= 100_000
    assert report.bytes_used >= 0.999 * report.bytes_chosen
    numbers = [int(line.split(":")[0].split()[1]) for line in drawn]
    halves = [sum(number < 500 for number in numbers), sum(number >= 500 for number in numbers)]
    assert min(halves) > 0.35 * len(numbers), "a uniform sample takes from the head and the tail alike"


def test_the_seed_decides_and_nothing_else(tmp_path: Path) -> None:
    entry = write_texts(tmp_path / "a.jsonl", _documents(600))
    contents = []
    for name, seed in (("1", 1), ("2", 1), ("3", 2)):
        _draw([entry], tmp_path / name, sample_bytes=50_000, seed=seed)
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1] != contents[2]
    zipped = tmp_path / "b.jsonl.gz"
    zipped.write_bytes(gzip.compress(Path(entry).read_bytes()))
    _draw([str(zipped)], tmp_path / "4", sample_bytes=50_000)
    assert (tmp_path / "4").read_bytes() == contents[0]


def test_held_out_text_is_not_trained_on_and_a_small_source_is_told(tmp_path: Path) -> None:
    large = write_texts(tmp_path / "large.jsonl", _documents(9000))
    small = write_texts(tmp_path / "small.jsonl", ["the only text here"])
    (of_large, of_small), report = _draw([large, small], tmp_path / "s.txt")
    assert of_large.held_out and len(of_large.texts) > 40
    assert not set(of_large.texts) & set((tmp_path / "s.txt").read_text(encoding="utf-8").split("\n"))
    assert not of_small.held_out and of_small.texts == ["the only text here"]
    assert report.bytes_offered == report.bytes_chosen + sum(len(text.encode()) for text in of_large.texts)


def test_too_many_bad_lines_are_refused_with_examples(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": 1}\n' * 10, encoding="utf-8")
    fault = fault_of(_draw, [str(path)], tmp_path / "s.txt")
    assert fault.key == "max_bad_fraction" and "10 of 20" in fault.rule and "byte 17" in fault.remedy
    _, report = _draw([str(path)], tmp_path / "s.txt", max_bad_fraction=0.6)
    assert report.bad_lines == {"text field is not a string": 10}
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(path.read_bytes().replace(b"1", b'"as well"'), mtime=0)[:-9])
    fault = fault_of(_draw, [str(cut)], tmp_path / "s.txt", max_bad_fraction=0.6)
    assert "(100 %)" in fault.rule and "cut.jsonl.gz" in fault.rule, "of a file that breaks off all is lost"
    path.write_text('{"text": ""}\n', encoding="utf-8")
    assert fault_of(_draw, [str(path)], tmp_path / "s.txt", max_bad_fraction=1.0).key == "input"


def _zipf(rng: random.Random, letters: str, number: int, longest: int, count: int) -> list[str]:
    """Made-up words with frequencies as in a real text: the tenth is a tenth as frequent as the first."""
    words = ["".join(rng.choices(letters, k=rng.randint(1, longest))) for _ in range(number)]
    return rng.choices(words, [1 / (rank + 3) for rank in range(number)], k=count)


def _lines(language: str) -> list[str]:
    """About 2 MB of made-up text; the Japanese words have no spaces between them, and each has an ending."""
    rng = random.Random(1)
    if language == "english":
        text, length = " ".join(_zipf(rng, "etaoinshrdlucmfw", 30_000, 10, 286_000)), 150
    else:
        kanji = "".join(map(chr, range(0x4E00, 0x4E00 + 1200)))
        words = _zipf(rng, kanji[:300] * 4 + kanji, 15_000, 3, 154_000)
        endings = _zipf(rng, "のにをはがとでもたしいてなられるかすまけりこよさあ", 3_000, 4, 154_000)
        text, length = "".join(part for pair in zip(words, endings, strict=True) for part in pair), 70
    return [text[i : i + length] for i in range(0, len(text), length)]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("language", ["english", "japanese"])
def test_no_training_takes_more_than_was_said(language: str, model_type: Any, tmp_path: Path) -> None:
    lines, config = _lines(language), TokenizerConfig(model_type=model_type, vocab_size=6000)
    expected = sampling.plan(config, find_files([write_texts(tmp_path / "text.jsonl", lines)], "config.yaml:1"))
    (tmp_path / "sentences.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    _, peak = training.train(config, tmp_path / "sentences.txt", tmp_path, tmp_path / "training.log")
    assert peak < expected.peak_bytes < 8 * peak


def test_the_free_memory_bounds_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = find_files([write_texts(tmp_path / "text.jsonl", _documents(20_000))], "config.yaml:1")
    made = []
    for free in (10**9, 10**12):
        monkeypatch.setattr(sampling, "available_memory", lambda free=free: free)
        made.append(sampling.plan(TokenizerConfig(), files))
    assert made[1].sample_bytes == sampling.AUTO_MOST_BYTES
    assert 15_000_000 < made[0].sample_bytes < 25_000_000, "by half of the free memory"
    assert made[0].peak_bytes == made[1].peak_bytes, "that of all the text that there is"
    monkeypatch.setattr(sampling, "available_memory", lambda: 100_000_000)
    fault = fault_of(sampling.plan, TokenizerConfig(sample_bytes=400_000_000), files)
    largest = int(fault.remedy.split()[1])
    assert fault.key == "sample_bytes" and largest > 0
    assert sampling.plan(TokenizerConfig(sample_bytes=largest), files).peak_bytes < 100_000_000
    auto = fault_of(sampling.plan, TokenizerConfig(), files)
    assert f"set {largest} or less" in auto.remedy and "auto" not in auto.remedy, "which would need more as well"
    monkeypatch.setattr(sampling, "available_memory", lambda: 10_000_000)
    assert "free some memory" in fault_of(sampling.plan, TokenizerConfig(), files).remedy
    monkeypatch.setattr(sampling, "available_memory", lambda: 1_000_000_000)
    monkeypatch.setattr(sampling, "total_plain_bytes", lambda *_: 400_000_000)
    assert "or auto" in fault_of(sampling.plan, TokenizerConfig(sample_bytes=400_000_000), files).remedy
