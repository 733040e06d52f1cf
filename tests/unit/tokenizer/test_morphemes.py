"""Pre-segmentation: the text stays as it is, no piece is learnt across a boundary, a missing analyser is named."""

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
from configs import fault_of

from zerokara.base.errors import RunError
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.tokenizer import morphemes, training
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.model_file import ModelFile, PieceType
from zerokara.tokenizer.morphemes import ANALYSERS, Analyse, Analyser

HARD = [
    "東京に 住んで  いる😀人。",
    "𠮷野家で𩸽を食べた",
    "か\u3099き と は\u309aん",  # combining voicing marks
    "ﾊﾝｶｸｶﾞﾅ ｱｲｳ",
    "\t tab\t  と　全角の空白",
    " 나는 학교에  갔다😀  했다.  ",
    "\u1112\u1161\u11ab글 ㅋㅋㅋ",  # Hangul in conjoining letters
    "👨\u200d👩\u200d👧 と 👍🏽 と 🇯🇵🇰🇷",
    " ",
    "   a",
]
PLAIN, NFKC = TokenizerConfig(), TokenizerConfig(normalization_rule_name="nfkc")
SYMBOLS = TokenizerConfig(user_defined_symbols=("<sep>", "<s"))


def _every_character(text: str) -> Iterable[tuple[int, int]]:
    """A fake analyser to which each character, spaces too, is a morpheme."""
    return [(i, i + 1) for i in range(len(text))]


def _kanji_and_endings(text: str) -> Iterable[tuple[int, int]]:
    """A fake analyser that parts words of kanji from what follows them, and skips spaces as MeCab does."""
    return [match.span() for match in re.finditer(r"[一-鿿]+|[^\s一-鿿]+", text)]


@pytest.mark.parametrize("analyse", [_every_character, _kanji_and_endings])
@pytest.mark.parametrize("config", [PLAIN, NFKC])
def test_nothing_of_the_text_is_changed_or_lost(analyse: Analyse, config: TokenizerConfig) -> None:
    for text in HARD:
        parts = morphemes.morphemes(text, analyse, config)
        assert "".join(parts) == text and all(parts)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        *[(PLAIN, [grapheme, "x"]) for grapheme in ("か\u3099", "ｶﾞ", "𠮷", "👍🏽", "👨\u200d👩", "🇯🇵", "❤\ufe0f")],
        (PLAIN, ["\u1112\u1161\u11ab", "글"]),
        (PLAIN, ["a", "  b"]),
        (PLAIN, ["  a", " "]),
        (PLAIN, ["a", "\t", "b"]),
        (PLAIN, ["a", "　", "b"]),
        (NFKC, ["a", "　b"]),  # it becomes a space
        (SYMBOLS, ["a", "b", "<sep>", "c"]),
    ],
)
def test_graphemes_and_symbols_are_whole_and_spaces_precede(config: TokenizerConfig, expected: list[str]) -> None:
    assert morphemes.morphemes("".join(expected), _every_character, config) == expected


def test_morphemes_that_share_a_character_are_not_cut_in_it() -> None:
    """Kiwi finds in 배웁니다 the morphemes 배우 (0 to 2), 이 (1 to 2), ᆸ니다 (1 to 4)."""
    for expected, spans in (
        (["배웁니다", "요"], [(0, 2), (1, 2), (1, 4), (4, 5)]),
        (["했", "다"], [(0, 1), (0, 1), (1, 2)]),
    ):
        assert morphemes.morphemes("".join(expected), lambda _, spans=spans: spans, PLAIN) == expected


def test_an_analyser_that_changes_the_text_is_refused() -> None:
    assert list(morphemes._spans_of("a b", ["a", "b"])) == [(0, 1), (2, 3)]
    for surfaces in (["a", "B"], ["b"]):
        with pytest.raises(RunError, match=r"'[bB]'"):
            list(morphemes._spans_of("a b", surfaces))


def _write(path: Path, lines: list[str]) -> Path:
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


def _words(count: int = 4000) -> list[str]:
    rng, letters, endings = random.Random(1), "東京大阪神社学校駅人山川", ("が", "を", "には", "から", "です", "ました")
    stems = ["".join(rng.choices(letters, k=rng.randint(2, 4))) for _ in range(400)]
    return [
        "".join(rng.choice([" ", ""]) + rng.choice(stems) + rng.choice(endings) for _ in range(rng.randint(2, 6)))
        for _ in range(count)
    ]


def _train(tmp_path: Path, lines: list[str], analyse: Analyse | None, **settings: Any) -> ModelFile:
    config = TokenizerConfig(**{"vocab_size": 450, "num_threads": 1, "character_coverage": 1.0, **settings})
    sentences = _write(tmp_path / "sentences.txt", lines)
    cut = tmp_path / "morphemes.txt" if analyse else None
    if analyse and cut:
        morphemes.segment(config, Analyser("fake", "", lambda: analyse), sentences, cut, 1)
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
    assert {"ました", "から"} <= {piece.text for piece in model.pieces}, "morphemes that always end at a boundary, too"
    encoder = Encoder(tmp_path / "tokenizer.model")
    for line in [*lines[:200], *HARD]:
        assert encoder.decode(encoder.encode(line)) == line
    used = [encoder.pieces[i] for line in lines[:200] for i in encoder.encode(line)]
    assert sum(piece.count("▁") for piece in used) == sum(line.count(" ") for line in lines[:200])
    assert _crossing_pieces(_train(tmp_path, lines, None, model_type=model_type), lines), "without the analyser"


def _particles(text: str) -> Iterable[tuple[int, int]]:
    """A fake analyser to which って is a morpheme behind と only, and else the end of one and a て."""
    return [match.span() for match in re.finditer(r"[一-鿿]っ|(?<=と)って|[一-鿿]+|.", text)]


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_a_part_of_two_is_used_less_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte_fallback: bool) -> None:
    rng = random.Random(1)
    words = ["言って", "行って", "立って", *["東京", "大阪", "学校", "神社の", "駅に"] * 2, "とって"]
    lines = ["".join(rng.choices(words, k=8)) for _ in range(3000)]
    lines += ["稀".join(rng.choices(words, k=2)) for _ in range(3)]
    # Without the byte pieces there is room for sentinels instead.
    settings = {"byte_fallback": byte_fallback, "extra_ids": 0 if byte_fallback else 256, "reserved_pieces": ()}

    def trained() -> tuple[list[str], float]:
        model = _train(tmp_path, lines, _particles, vocab_size=310, character_coverage=0.9995, **settings)
        encoder = Encoder(tmp_path / "tokenizer.model")
        used = [encoder.pieces[i] for line in lines[:500] for i in encoder.encode(line)]
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
    texts = [piece.text for piece in model.pieces]
    assert model.add_dummy_prefix and "ました" in texts and "▁ました" not in texts
    assert any(re.fullmatch("▁[一-鿿]+", text) for text in texts)
    encoder = Encoder(tmp_path / "tokenizer.model")
    assert encoder.pieces[encoder.encode(lines[0])[0]].startswith("▁")


def _analyser(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str) -> Analyser:
    """An analyser in a module that started processes find as well, which are used for a short text, too."""
    (folder / f"{name}.py").write_text(f"import os\ndef start():\n    {body}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(morphemes, "ALONE_BYTES", 0)
    return Analyser(name, "", importlib.import_module(name).start)


def test_any_number_of_processes_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_two = "return lambda text: [(i, min(i + 2, len(text))) for i in range(0, len(text), 2)]"
    analyser = _analyser(tmp_path, monkeypatch, "analyser_by_two", by_two)
    monkeypatch.setattr(morphemes, "BLOCK_BYTES", 16_000)
    sentences, contents = _write(tmp_path / "sentences.txt", _words()), []
    for number in (1, 2):
        morphemes.segment(PLAIN, analyser, sentences, tmp_path / "cut.txt", number)
        contents.append((tmp_path / "cut.txt").read_bytes())
    assert contents[0] == contents[1]
    assert contents[0].replace(b"\n", b"") == sentences.read_bytes().replace(b"\n", b"")


def test_the_death_of_a_process_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    analyser = _analyser(tmp_path, monkeypatch, "dying_analyser", "os._exit(9)")
    with pytest.raises(RunError, match=r"dying.*num_threads.* 2"):
        morphemes.segment(PLAIN, analyser, _write(tmp_path / "sentences.txt", ["a"]), tmp_path / "cut.txt", 2)


@pytest.mark.parametrize("name", sorted(ANALYSERS))
def test_a_missing_analyser_is_named_with_what_installs_it(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "distributions", lambda **_: [])
    fault = fault_of(morphemes.analyser_of, TokenizerConfig(pre_segment=name))
    assert (fault.key, fault.value) == ("pre_segment", name)
    assert fault.remedy.endswith(".venv/bin/pip install " + ANALYSERS[name].requirements)
    assert morphemes.analyser_of(PLAIN) is None


def test_the_extras_the_lock_and_the_messages_name_the_same_versions(root: Path) -> None:
    extras = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = {analyser.name: analyser.requirements.split() for analyser in ANALYSERS.values()}
    assert extras == named
    lock = (root / "requirements/analysers.lock").read_text("utf-8").splitlines()
    versions = {requirement.lower() for names in named.values() for requirement in names}
    assert versions <= {line.removesuffix(" \\") for line in lock}


REAL = {
    **dict.fromkeys(("mecab", "sudachi"), ("昨日は東京へ行きました。", ["東京", "まし", "た"])),
    **dict.fromkeys(("kiwi", "mecab_ko"), ("나는 어제 학교에 갔다.", ["는", " 학교", "에"])),
}
INSTALLED = [name for name in sorted(REAL) if all(ANALYSERS[name].versions().values())]


@pytest.mark.parametrize("name", INSTALLED)
def test_the_real_analysers_keep_the_text_and_find_morphemes(name: str) -> None:
    assert ANALYSERS[name].versions().keys() == {one.split("==")[0] for one in ANALYSERS[name].requirements.split()}
    analyse = ANALYSERS[name].start()
    text, expected = REAL[name]
    found = morphemes.morphemes(text, analyse, PLAIN)
    assert set(expected) <= set(found)
    assert morphemes.morphemes(" " + text, analyse, PLAIN)[1:] == found[1:], "a space before does not shift the spans"
    for hard in HARD:
        parts = morphemes.morphemes(hard, analyse, PLAIN)
        assert "".join(parts) == hard and all(parts)
        assert not any(part.endswith(" ") and part.strip() for part in parts)


def test_an_analyser_of_each_language_is_there_to_be_tried() -> None:
    needed = [requirement for name in ("sudachi", "mecab_ko") for requirement in ANALYSERS[name].requirements.split()]
    assert {"sudachi", "mecab_ko"} <= set(INSTALLED), f".venv/bin/pip install {' '.join(needed)}"
