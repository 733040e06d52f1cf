"""Tokenizers that step 1 did not make: ids as SentencePiece gives them for a whole document, and what is refused."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_models
import pytest
import sentencepiece
from configs import refused
from foreign_models import GEMMA, LLAMA, T5, documents

from zerokara.tokenizer import compatibility
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import open_encoder
from zerokara.tokenizer.model_file import ModelFile, PieceType

KINDS = {"llama": LLAMA, "t5": T5, "gemma": GEMMA}
HARD = ["", "\n", "\n\n\n", " ", "  a", "\n a\n\n\nb \n", "a\r\nb", "\t\n", "▁a ▁\n▁", "</s>\n<0x0A>", "\u3000\na"]
Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Train each kind of tokenizer once; return the path of its model."""
    folder, paths = tmp_path_factory.mktemp("foreign"), dict[str, Path]()

    def make(kind: str, **other: Any) -> Path:
        key = repr((kind, sorted(other.items())))
        if key not in paths:
            paths[key] = foreign_models.train(folder / f"{len(paths)}.model", {**KINDS[kind], **other})
        return paths[key]

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_whole_document(made: Made, kind: str) -> None:
    path = made(kind)
    encoder, bare = Encoder(path), sentencepiece.SentencePieceProcessor(model_file=str(path))
    texts = [*documents(40, seed=9), *HARD]
    expected = [bare.encode(text) for text in texts]
    assert [encoder.encode(text).tolist() for text in texts] == expected
    assert [ids.tolist() for ids in encoder.encode_many(texts)] == expected
    assert encoder.encode_joined(texts)[0].tolist() == [i for ids in expected for i in [*ids, encoder.eos_id]]
    assert [encoder.decode(ids) for ids in expected] == [bare.decode(ids) for ids in expected]
    again = pickle.loads(pickle.dumps(encoder))
    assert again.sha256 == encoder.sha256 and again.encode(texts[0]).tolist() == expected[0]


def test_end_and_padding_are_what_the_model_has(made: Made) -> None:
    llama, t5, gemma = (Encoder(made(kind)) for kind in KINDS)
    assert (llama.eos_id, llama.pad_id, llama.unk_id, llama.bos_id) == (2, 0, 0, 1), "<unk> where there is no <pad>"
    assert (t5.eos_id, t5.pad_id, t5.unk_id, t5.bos_id) == (1, 0, 2, -1)
    assert (gemma.eos_id, gemma.pad_id, gemma.unk_id, gemma.bos_id) == (1, 0, 3, 2)
    assert llama.unk_id not in llama.encode("\u0378\ue000 日\n")


def test_t5_gets_its_sentinels_and_the_file_stays(made: Made) -> None:
    path = made("t5")
    encoder, bare = Encoder(path), sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert encoder.adds_sentinels and encoder.vocab_size == bare.get_piece_size() + 100
    assert encoder.sentinel_ids == list(range(encoder.vocab_size - 1, bare.get_piece_size() - 1, -1)), "0 is the last"
    assert encoder.control_ids == {0, 1, *encoder.sentinel_ids}
    assert encoder.model_bytes == path.read_bytes() and len(encoder.token_texts) == encoder.vocab_size
    assert not set(encoder.sentinel_ids) & set(encoder.encode("a <extra_id_0> b").tolist())
    for other in ("llama", "gemma"):
        assert not Encoder(made(other)).adds_sentinels
    assert not Encoder(made("t5", bos_id=3)).adds_sentinels
    assert not Encoder(made("t5", control_symbols=["<extra_id_0>"])).adds_sentinels, "it has one of its own"


def test_the_notes_name_what_is_special(made: Made, toy: Encoder) -> None:
    words = {kind: " | ".join(compatibility.notes(Encoder(made(kind)))) for kind in KINDS}
    assert not compatibility.notes(toy)
    assert all("whole text" in said for said in words.values())
    assert "<unk>" in words["llama"] and "space before" in words["llama"] and "<unk>" not in words["gemma"]
    assert "100 sentinel" in words["t5"] and "sentinel" not in words["llama"]


def test_a_model_without_an_end_or_line_ends_is_refused_with_every_fault(made: Made) -> None:
    path = made("llama", byte_fallback=False, eos_id=-1)
    end, line_end = refused(open_encoder, path)
    assert end.where == line_end.where == str(path)
    assert "</s>" in end.rule and '"\\n"' in line_end.rule and "byte_fallback" in line_end.rule
    assert "step 1" in end.remedy and "step 1" in line_end.remedy
    open_encoder(made("llama", byte_fallback=False, user_defined_symbols=["\n"]))


def test_what_could_not_be_exported_is_refused_at_once(made: Made, tmp_path: Path) -> None:
    compatibility.check_exportable(Encoder(made("gemma")))
    model = ModelFile(made("llama").read_bytes())
    model._proto.pieces[-1].type = int(PieceType.UNUSED)
    (tmp_path / "unused.model").write_bytes(model.to_bytes())
    trimming = {"user_defined_symbols": ["\n"], "remove_extra_whitespaces": True}
    for path, rules in (
        (
            made("llama", user_defined_symbols=["<a>", "<b>", "<c>", "<d>"]),
            ["dummy prefix.*'<a>', '<b>', '<c>' and 1 more"],
        ),
        (made("llama", **trimming), [r"dummy prefix.*'\\n'", r"repeated.*'\\n'"]),
        (made("llama", treat_whitespace_as_suffix=True), ["treat_whitespace_as_suffix"]),
        (tmp_path / "unused.model", [re.escape(repr(model.pieces[-1].text))]),
    ):
        found = [fault.rule for fault in refused(compatibility.check_exportable, Encoder(path))]
        assert all(re.search(*pair) for pair in zip(rules, found, strict=True)), found


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_keeps_its_space(made: Made, kind: str) -> None:
    encoder = Encoder(made(kind))
    start, whole = encoder.encode("the").tolist(), encoder.encode("the fox the").tolist()
    assert whole[: len(start)] == start
    assert encoder.decode_continuation(whole[len(start) :]) == " fox the" and encoder.decode_continuation([]) == ""
    for sentinel in encoder.sentinel_ids[:1]:
        assert encoder.decode_continuation([sentinel, *whole]) == "<extra_id_0> the fox the"
