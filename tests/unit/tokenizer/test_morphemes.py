"""Pre-segmentation: the text stays as it is, no piece is learnt across a boundary, a missing analyser is told."""

from __future__ import annotations

import importlib
import random
import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.errors import RunError, UserError
from zerokara.tokenizer import morphemes, training
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.model_file import ModelFile, PieceType
from zerokara.tokenizer.morphemes import ANALYSERS, Analyse, Analyser, boundaries

LETTERS = "東京大阪神社学校駅人山川"
ENDINGS = ("が", "を", "には", "から", "です", "ました")
HARD = [
    "東京に 住んで  いる😀人。",
    "𠮷野家で𩸽を食べた",
    "か\u3099き と は\u309aん",  # combining voicing marks
    "ﾊﾝｶｸｶﾞﾅ ｱｲｳ",
    "ＡＢＣ１２３ ＆ abc",
    "\t tab\t  と　全角の空白",
    " 나는 학교에  갔다😀  했다.  ",
    "\u1112\u1161\u11ab글 ㅋㅋㅋ",  # Hangul in conjoining letters
    "👨\u200d👩\u200d👧 と 👍🏽 と 🇯🇵🇰🇷",
    "東",
    " ",
    "   a",
]


PLAIN = TokenizerConfig()


def _every_character(text: str) -> Iterable[tuple[int, int]]:
    """A fake analyser to which each character, spaces too, is a morpheme."""
    return [(i, i + 1) for i in range(len(text))]


def _kanji_and_endings(text: str) -> Iterable[tuple[int, int]]:
    """A fake analyser that parts words of kanji from what follows them, and skips spaces as MeCab does."""
    return [match.span() for match in re.finditer(r"[一-鿿]+|[^\s一-鿿]+", text)]


def _fake(analyse: Analyse) -> Analyser:
    return Analyser("fake", "ja", "", lambda: analyse)


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("analyse", [_every_character, _kanji_and_endings])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_nothing_of_the_text_is_changed_or_lost(text: str, analyse: Analyse, rule: Any) -> None:
    parts = morphemes.morphemes(text, analyse, TokenizerConfig(normalization_rule_name=rule))
    assert "".join(parts) == text and all(parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("か\u3099き", ["か\u3099", "き"]),
        ("ｶﾞｱ", ["ｶﾞ", "ｱ"]),
        ("𠮷野", ["𠮷", "野"]),
        ("👍🏽a", ["👍🏽", "a"]),
        ("👨\u200d👩a", ["👨\u200d👩", "a"]),
        ("🇯🇵x", ["🇯🇵", "x"]),
        ("\u1112\u1161\u11ab글", ["\u1112\u1161\u11ab", "글"]),
        ("❤\ufe0fa", ["❤\ufe0f", "a"]),
        ("a  b", ["a", "  b"]),
        ("  a ", ["  a", " "]),
        ("a\tb", ["a", "\t", "b"]),
        ("a　b", ["a", "　", "b"]),
    ],
)
def test_what_is_seen_as_one_character_is_never_cut_and_spaces_go_with_what_follows(
    text: str, expected: list[str]
) -> None:
    assert morphemes.morphemes(text, _every_character, PLAIN) == expected


def test_white_space_that_becomes_a_space_goes_with_what_follows() -> None:
    parts = morphemes.morphemes("a　b", _every_character, TokenizerConfig(normalization_rule_name="nfkc"))
    assert parts == ["a", "　b"]


def test_morphemes_that_share_a_character_are_not_cut_in_it() -> None:
    # As Kiwi tells 배웁니다: 배우 (0 to 2), 이 (1 to 2), ᆸ니다 (1 to 4).
    assert boundaries("배웁니다요", [(0, 2), (1, 2), (1, 4), (4, 5)], str.isspace) == [4]
    assert boundaries("했다", [(0, 1), (0, 1), (1, 2)], str.isspace) == [1]


def test_user_symbols_are_not_cut() -> None:
    config = TokenizerConfig(user_defined_symbols=("<sep>", "<s"))
    assert morphemes.morphemes("ab<sep>c", _every_character, config) == ["a", "b", "<sep>", "c"]


def test_an_analyser_that_changes_the_text_is_refused() -> None:
    assert list(morphemes._spans_of("a b", ["a", "b"])) == [(0, 1), (2, 3)]
    for surfaces in (["a", "B"], ["b"]):
        with pytest.raises(RunError, match=r"'[bB]'"):
            list(morphemes._spans_of("a b", surfaces))


def _write(path: Path, lines: list[str]) -> Path:
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


def _words(count: int = 6000) -> list[str]:
    rng = random.Random(1)
    stems = ["".join(rng.choices(LETTERS, k=rng.randint(2, 4))) for _ in range(400)]
    return [
        "".join(rng.choice([" ", ""]) + rng.choice(stems) + rng.choice(ENDINGS) for _ in range(rng.randint(2, 6)))
        for _ in range(count)
    ]


def _train(tmp_path: Path, lines: list[str], analyse: Analyse | None, **settings: Any) -> ModelFile:
    config = TokenizerConfig(**{"vocab_size": 450, "num_threads": 1, "character_coverage": 1.0, **settings})
    sentences = _write(tmp_path / "sentences.txt", lines)
    cut = tmp_path / "morphemes.txt" if analyse else None
    if analyse and cut:
        morphemes.segment(config, _fake(analyse), sentences, cut, 1)
    trained, _ = training.train(config, sentences, tmp_path, tmp_path / "training.log", cut)
    (tmp_path / "tokenizer.model").write_bytes(trained)
    return ModelFile(trained)


def _crossing_pieces(model: ModelFile, lines: list[str]) -> set[str]:
    """Learnt pieces that stand within no morpheme of the text."""
    inside = "\n".join(part for line in lines for part in morphemes.morphemes(line, _kanji_and_endings, PLAIN))
    learnt = (piece.text.replace("▁", " ") for piece in model.pieces if piece.type is PieceType.NORMAL)
    return {piece for piece in learnt if len(piece.strip()) > 1 and piece not in inside}


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_no_piece_is_learnt_across_a_boundary(tmp_path: Path, model_type: Any) -> None:
    lines = _words()
    model = _train(tmp_path, lines, _kanji_and_endings, model_type=model_type)
    assert not _crossing_pieces(model, lines)
    pieces = {piece.text for piece in model.pieces}
    assert {"ました", "から"} <= pieces, "whole morphemes are learnt, also those that always end at a boundary"
    encoder = Encoder(tmp_path / "tokenizer.model")
    for line in [*lines[:200], *HARD]:
        assert encoder.decode(encoder.encode(line)) == line
    used = [encoder.piece(i) for line in lines[:200] for i in encoder.encode(line)]
    assert sum(piece.count("▁") for piece in used) == sum(line.count(" ") for line in lines[:200])

    plain = _train(tmp_path, lines, None, model_type=model_type)
    assert _crossing_pieces(plain, lines), "without the analyser pieces do cross"


def _particles(text: str) -> Iterable[tuple[int, int]]:
    """A fake analyser to which って is a morpheme behind と only, and else the end of one and a て."""
    return [match.span() for match in re.finditer(r"[一-鿿]っ|(?<=と)って|[一-鿿]+|.", text)]


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_a_morpheme_that_is_parts_of_two_elsewhere_is_used_less_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte_fallback: bool
) -> None:
    rng = random.Random(1)
    words = ["言って", "行って", "立って", *["東京", "大阪", "学校", "神社の", "駅に"] * 2, "とって"]
    lines = ["".join(rng.choices(words, k=8)) for _ in range(3000)]
    lines += ["稀".join(rng.choices(words, k=2)) for _ in range(3)]

    def trained() -> tuple[list[str], float]:
        # Without the byte pieces there is room for sentinels instead.
        settings: Any = {
            "byte_fallback": byte_fallback,
            "extra_ids": 0 if byte_fallback else 256,
            "reserved_pieces": (),
        }
        model = _train(tmp_path, lines, _particles, vocab_size=310, character_coverage=0.9995, **settings)
        encoder = Encoder(tmp_path / "tokenizer.model")
        used = [encoder.piece(i) for line in lines[:500] for i in encoder.encode(line)]
        crossed = sum(piece == "って" and before != "と" for before, piece in pairwise(used))
        return sorted(piece.text for piece in model.pieces), crossed / sum(line.count("って") for line in lines[:500])

    pieces, share = trained()
    monkeypatch.setattr(training, "rescore", lambda *_: None)
    pieces_before, share_before = trained()
    assert pieces == pieces_before and "って" in pieces
    assert share_before > 0.5 and share < 0.05


def test_sentences_begin_with_a_space_and_morphemes_do_not(tmp_path: Path) -> None:
    lines = [line.replace(" ", "") for line in _words()]
    model = _train(tmp_path, lines, _kanji_and_endings, add_dummy_prefix=True)
    assert model.add_dummy_prefix
    texts = [piece.text for piece in model.pieces]
    assert "ました" in texts and "▁ました" not in texts
    assert any(re.fullmatch("▁[一-鿿]+", text) for text in texts)
    encoder = Encoder(tmp_path / "tokenizer.model")
    assert encoder.piece(encoder.encode(lines[0])[0]).startswith("▁")


def test_too_large_a_vocabulary_is_told_with_the_largest_that_works(tmp_path: Path) -> None:
    lines = _words(300)
    with pytest.raises(UserError) as caught:
        _train(tmp_path, lines, _kanji_and_endings, vocab_size=90_000)
    (fault,) = caught.value.faults
    assert (fault.key, fault.value) == ("vocab_size", 90_000)
    largest = int(re.findall(r"set (\d+) or", fault.remedy)[0])
    assert len(_train(tmp_path, lines, _kanji_and_endings, vocab_size=largest).pieces) == largest


def test_any_number_of_processes_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fake_analyser.py").write_text(
        "def start():\n    return lambda text: [(i, min(i + 2, len(text))) for i in range(0, len(text), 2)]\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))  # Processes that are started find it there as well.
    monkeypatch.setattr(morphemes, "ALONE_BYTES", 0)
    start = importlib.import_module("fake_analyser").start
    sentences = _write(tmp_path / "sentences.txt", _words(20_000))
    contents = []
    for number in (1, 3):
        analyser = Analyser("fake", "ja", "", start)
        morphemes.segment(TokenizerConfig(), analyser, sentences, tmp_path / "cut.txt", number)
        contents.append((tmp_path / "cut.txt").read_bytes())
    assert contents[0] == contents[1]
    assert contents[0].replace(b"\n", b"") == sentences.read_bytes().replace(b"\n", b"")


def test_a_process_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying_analyser.py").write_text("import os\ndef start():\n    os._exit(9)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(morphemes, "ALONE_BYTES", 0)
    analyser = Analyser("dying", "ja", "", importlib.import_module("dying_analyser").start)
    sentences = _write(tmp_path / "sentences.txt", ["a"])
    with pytest.raises(RunError, match=r"dying.*num_threads.* 2"):
        morphemes.segment(TokenizerConfig(), analyser, sentences, tmp_path / "cut.txt", 2)


@pytest.mark.parametrize("name", sorted(ANALYSERS))
def test_a_missing_analyser_is_told_with_the_command_that_installs_it(
    name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distributions", lambda **_: [])
    with pytest.raises(UserError) as caught:
        morphemes.analyser_of(TokenizerConfig(pre_segment=name))
    (fault,) = caught.value.faults
    assert (fault.key, fault.value) == ("pre_segment", name)
    assert fault.remedy.endswith(".venv/bin/pip install " + ANALYSERS[name].requirements)
    assert morphemes.analyser_of(TokenizerConfig()) is None


def test_the_extras_the_lock_and_the_messages_name_the_same_versions(root: Path) -> None:
    extras = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert extras == {analyser.name: analyser.requirements.split() for analyser in ANALYSERS.values()}
    lock = (root / "requirements-analysers.lock").read_text("utf-8").splitlines()
    named = {requirement.lower() for names in extras.values() for requirement in names}
    assert named <= {line.removesuffix(" \\") for line in lock}


REAL = {
    "mecab": ("昨日は東京へ行きました。", ["東京", "まし", "た"]),
    "sudachi": ("昨日は東京へ行きました。", ["東京", "まし", "た"]),
    "kiwi": ("나는 어제 학교에 갔다.", ["는", " 학교", "에"]),
    "mecab_ko": ("나는 어제 학교에 갔다.", ["는", " 학교", "에"]),
}
INSTALLED = [name for name in sorted(REAL) if all(ANALYSERS[name].versions().values())]


@pytest.mark.parametrize("name", INSTALLED)
def test_the_real_analysers_keep_the_text_and_find_morphemes(name: str) -> None:
    assert ANALYSERS[name].versions().keys() == {one.split("==")[0] for one in ANALYSERS[name].requirements.split()}
    analyse = ANALYSERS[name].start()
    text, expected = REAL[name]
    assert set(expected) <= set(morphemes.morphemes(text, analyse, PLAIN))
    shorter = " " + text  # What stands before must not shift what is found behind it.
    assert morphemes.morphemes(shorter, analyse, PLAIN)[1:] == morphemes.morphemes(text, analyse, PLAIN)[1:]
    for hard in HARD:
        parts = morphemes.morphemes(hard, analyse, PLAIN)
        assert "".join(parts) == hard and all(parts)
        assert not any(part.endswith(" ") and part.strip() for part in parts)


def test_an_analyser_of_each_language_is_there_to_be_tried() -> None:
    needed = [requirement for name in ("sudachi", "mecab_ko") for requirement in ANALYSERS[name].requirements.split()]
    assert {"sudachi", "mecab_ko"} <= set(INSTALLED), f".venv/bin/pip install {' '.join(needed)}"
