"""Training: the same bytes every time, and impossible settings told with the numbers that work."""

import re
from pathlib import Path
from typing import Any

import pytest
from configs import fault_of
from toy_tokenizers import TrainToy, toy_lines

from zerokara.base.errors import RunError
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.tokenizer import trainer_process, training
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.model_file import SCORE_STEP, ModelFile, PieceType


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_the_same_sentences_and_threads_give_the_same_bytes(train_toy: TrainToy, model_type: str) -> None:
    first, second = (train_toy(model_type=model_type, num_threads=2, again=True).read_bytes() for _ in range(2))
    assert first == second
    assert b"toy" not in first, "a path in the model would make it another one elsewhere"


def _size_that_works(train_toy: TrainToy, **settings: Any) -> int:
    fault = fault_of(train_toy, **settings)
    assert fault.key == "vocab_size" and fault.value == settings["vocab_size"]
    (number,) = re.findall(r"set (\d+) or", fault.remedy)
    return int(number)


@pytest.mark.parametrize("settings", [{"model_type": "unigram"}, {"model_type": "bpe", "extra_ids": 2}])
def test_too_large_a_size(train_toy: TrainToy, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    largest = _size_that_works(train_toy, vocab_size=90_000, **settings)
    trained_again = settings["model_type"] == "unigram"
    assert ("90,000" in capsys.readouterr().out) == trained_again, "a second training is announced"
    assert Encoder(train_toy(vocab_size=largest, **settings)).vocab_size == largest
    assert _size_that_works(train_toy, vocab_size=largest + 1, **settings) == largest


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "unigram"},
        {"model_type": "bpe", "byte_fallback": False, "extra_ids": 2},
        {"character_coverage": 0.985, "user_defined_symbols": ("fox", "<x>")},
        {"normalization_rule_name": "nmt_nfkc_cf"},
        {"add_dummy_prefix": True},
    ],
)
def test_too_small_a_vocabulary_names_the_smallest_that_works(train_toy: TrainToy, settings: dict[str, Any]) -> None:
    many_characters = ["".join(map(chr, range(0x4E00, 0x4E00 + 300))) + " the quick fox 42"] * 20
    settings = {**settings, "lines": [*many_characters, "the lazy\tdogs", "țară ﬁn ＡＢ", "unit\x1fseparator"]}
    smallest = _size_that_works(train_toy, vocab_size=300, **settings)
    assert Encoder(train_toy(vocab_size=smallest, **settings)).vocab_size == smallest
    assert _size_that_works(train_toy, vocab_size=smallest - 1, **settings) == smallest


def test_nothing_to_train_on_is_a_fault_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "sentences.txt").write_bytes(b"")
    paths = (tmp_path / "sentences.txt", tmp_path, tmp_path / "training.log")
    assert fault_of(training.train, TokenizerConfig(), *paths).key == "input"


def test_symbols_are_whole(train_toy: TrainToy) -> None:
    encoder = Encoder(train_toy(user_defined_symbols=("<sep>", "quickfox")))
    pieces = [encoder.pieces[i] for i in encoder.encode("2024<sep>aquickfoxb")]
    assert "<sep>" in pieces and "quickfox" in pieces


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("prefix", [False, True])
def test_digits_of_every_script_are_single(train_toy: TrainToy, model_type: str, prefix: bool) -> None:
    zeros = "0", "\u0966", "\u0660", "\uff10", "\U0001d7ce"  # ASCII, Devanagari, Arabic, full width, mathematical bold
    numbers = [[chr(ord(zero) + int(digit)) for digit in f"2024{n}"] for zero in zeros for n in range(1000, 1100)]
    lines = [f"वर्ष {''.join(digits)} में{''.join(digits[:2])}" for digits in numbers]
    settings: dict[str, Any] = {"model_type": model_type, "add_dummy_prefix": prefix, "vocab_size": 600}
    settings["lines"] = [*toy_lines(200), *lines]
    encoder = Encoder(train_toy(**settings))
    learnt = [piece.text for piece in encoder.model.pieces if piece.type is PieceType.NORMAL]
    assert not [text for text in learnt if len(text) > 1 and re.search(r"\d", text)]
    for line, digits in zip(lines, numbers, strict=True):
        pieces = [encoder.pieces[i] for i in encoder.encode(line)]
        assert [piece for piece in pieces if re.search(r"\d", piece)] == [*digits, *digits[:2]]
    whole = {piece.text for piece in ModelFile(train_toy(**settings, split_digits=False).read_bytes()).pieces}
    assert any(len(text) > 1 and re.search("[\u0966-\u096f]", text) for text in whole)


def test_no_piece_crosses_a_line_end_and_scores_sum_without_rounding(toy: Encoder) -> None:
    pieces = ModelFile(toy.model_bytes).pieces
    assert [piece.text for piece in pieces if "\n" in piece.text] == ["\n"]
    assert all((piece.score / SCORE_STEP).is_integer() for piece in pieces)
    assert pieces[toy.eos_id].type is PieceType.CONTROL and pieces[toy.newline_id].type is PieceType.USER_DEFINED


def test_every_sentence_is_used_and_told_in_the_log(train_toy: TrainToy, capfd: pytest.CaptureFixture[str]) -> None:
    lines = ["fox " * 1048, "fox\ttab", "語" * 1397, "the quick brown fox"] * 10
    path = train_toy(lines=lines, vocab_size=310, model_type="bpe", reserved_pieces=(), again=True)
    assert "\t" in {piece.text for piece in ModelFile(path.read_bytes()).pieces}
    log, shown = (path.parent / "training.log").read_text(encoding="utf-8"), capfd.readouterr()
    assert "trainer_interface" in log and "Loaded all 40 sentences" in log and "Skipped" not in log
    assert shown.out == "" and "trainer_interface" not in shown.err


@pytest.mark.parametrize(
    ("command", "message"),
    [("kill -9 $$", "signal 9.* memory .*sample_bytes"), ("echo oh >&2; exit 1", "failed: oh; its log is .*log")],
)
def test_a_failure_is_told(train_toy: TrainToy, monkeypatch: pytest.MonkeyPatch, command: str, message: str) -> None:
    real = trainer_process.subprocess.Popen

    def failing(_: list[str], **options: Any) -> Any:
        return real(["/bin/sh", "-c", command], **options)

    monkeypatch.setattr(trainer_process.subprocess, "Popen", failing)
    with pytest.raises(RunError, match=message):
        train_toy(again=True)
