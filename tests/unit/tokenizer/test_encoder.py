"""Text to ids and back: what every later step builds on."""

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from configs import fault_of
from toy_tokenizers import TrainToy, byte_ids, toy_lines

from zerokara.tokenizer.compatibility import HARD_TEXTS
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import open_encoder
from zerokara.tokenizer.model_file import SPACE_MARK, ModelFile

TEXTS = [*(text for text in HARD_TEXTS if SPACE_MARK not in text), "</s><s><pad><unk></s><EOD>", "a" * 5000]


@pytest.fixture(
    params=[{}, {"model_type": "bpe", "extra_ids": 3}, {"add_dummy_prefix": True}, {"byte_fallback": False}],
    ids=["unigram", "bpe", "prefixed", "no bytes"],
)
def encoder(request: pytest.FixtureRequest, train_toy: TrainToy) -> Encoder:
    return Encoder(train_toy(**request.param))


def test_decoding_gives_the_text_back(encoder: Encoder) -> None:
    for text in TEXTS:
        ids = encoder.encode(text)
        if encoder.unk_id not in ids:
            assert encoder.decode(ids) == text
    spaces = "\t the  fox\n\n  dogs \t\r\n"
    assert encoder.decode(encoder.encode(spaces)) == spaces, "white space must survive without byte pieces too"
    ids = [encoder.bos_id, *encoder.encode("the fox").tolist(), encoder.eos_id, encoder.pad_id]
    assert encoder.decode(ids) == "the fox", "control ids stand for no text"


def test_ids_are_those_of_the_lines_joined_by_the_line_end(encoder: Encoder) -> None:
    bare, expected = sentencepiece.SentencePieceProcessor(model_file=str(encoder.model_path)), []
    for text in TEXTS:
        first, *others = map(bare.encode, text.split("\n"))
        expected.append([*first, *(i for line in others for i in [encoder.newline_id, *line])])
        assert encoder.encode(text).tolist() == expected[-1] and encoder.encode(text).dtype == np.int32
    assert [ids.tolist() for ids in encoder.encode_many(TEXTS)] == expected and encoder.encode_many([]) == []
    ids, text_bytes = encoder.encode_joined(TEXTS)
    assert ids.tolist() == [i for each in expected for i in [*each, encoder.eos_id]]
    assert text_bytes == [len(text.encode()) for text in TEXTS] and encoder.encode_joined([])[0].size == 0
    again = pickle.loads(pickle.dumps(encoder))
    assert again.sha256 == encoder.sha256 and again.encode(TEXTS[10]).tolist() == expected[10]


def test_text_that_spells_control_tokens_is_text(encoder: Encoder) -> None:
    assert not encoder.control_ids & set(encoder.encode("</s><EOD>").tolist())
    names = [encoder.pieces[i] for i in sorted(encoder.control_ids | {encoder.unk_id})]
    for text in [*names, " ".join(names), "k".join(names)]:
        ids = encoder.encode(text)
        assert not (encoder.control_ids | {encoder.unk_id}) & set(ids.tolist()), text
        assert encoder.decode(ids) == text


def test_special_ids_are_the_agreed_ones(toy: Encoder, toy_bpe: Encoder) -> None:
    for encoder in (toy, toy_bpe):
        assert (encoder.unk_id, encoder.bos_id, encoder.eos_id, encoder.pad_id, encoder.newline_id) == (0, 1, 2, 3, 4)
        assert encoder.vocab_size == 520 and len(byte_ids(encoder)) == 256
    assert [toy_bpe.pieces[i] for i in (517, 518, 519)] == ["<extra_id_2>", "<extra_id_1>", "<extra_id_0>"]
    assert toy_bpe.control_ids == {1, 2, 3, *range(509, 520)}  # of them 8 reserved pieces, 3 sentinel tokens


def test_the_texts_of_tokens_sum_to_the_bytes_of_the_text(toy: Encoder, toy_bpe: Encoder) -> None:
    for encoder in (toy, toy_bpe):
        sizes = np.array([*map(len, encoder.token_texts)])
        assert len(sizes) == encoder.vocab_size
        assert sizes[encoder.eos_id] == 0 and sizes[encoder.newline_id] == 1
        for text in TEXTS:
            assert sizes[encoder.encode(text)].sum() == len(text.encode())


@pytest.mark.parametrize("content", [None, b"not a model", b""])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.model"
    if content is not None:
        path.write_bytes(content)
    fault = fault_of(Encoder, path)
    assert fault.where == str(path) and "step 1" in fault.remedy


def test_runs_of_lines_give_the_ids_of_the_lines(toy: Encoder) -> None:
    encoder, chance = Encoder(toy.model_path), random.Random(3)
    limit = encoder.run_characters
    assert limit > 500
    odd = ["", " ", "へ" * 700, "a" * 3000, "</s> <unk>", "\u2581", "\u0378" * 40, "👩‍👩‍👧 \t x"]
    lines = [*toy_lines(300, seed=9), *odd]
    for _ in range(60):
        text = "\n".join(chance.choices(lines, k=chance.randint(1, 200)))
        runs = encoder.runs(text)
        assert "\n".join(runs) == text
        assert all(len(run) <= limit or "\n" not in run for run in runs)
        alone = [encoder._processor.EncodeAsNumpy(line) for line in text.split("\n")]
        expected = np.frombuffer(np.int32(encoder.newline_id).tobytes().join(alone), dtype=np.int32)
        assert np.array_equal(encoder.encode(text), expected)


def test_runs_only_where_sums_are_exact(train_toy: TrainToy, tmp_path: Path) -> None:
    """Scores that are no multiples of 1/256, a dummy prefix, symbols or normalisation: each line by itself."""
    model = ModelFile(train_toy().read_bytes())
    next(piece for piece in model._proto.pieces if piece.type == 1).score -= 0.001
    (tmp_path / "uneven.model").write_bytes(model.to_bytes())
    settings: list[dict[str, Any]] = [{"add_dummy_prefix": True}, {"user_defined_symbols": ["[X]"]}]
    others = [train_toy(**each) for each in [*settings, {"normalization_rule_name": "nfkc"}, {"model_type": "bpe"}]]
    for path in [tmp_path / "uneven.model", *others]:
        encoder = Encoder(path)
        assert encoder.run_characters == 0 and encoder.runs("a\nb") == ["a", "b"]


def test_a_missing_tokenizer_is_told_with_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = "tokenizers/it/tokenizer.model"
    assert "step 1" in fault_of(Encoder, wanted).remedy
    Path("tokenizers", "romanian").mkdir(parents=True)
    assert "romanian" in fault_of(open_encoder, wanted).remedy


def test_a_worker_has_the_tokenizer_that_was_opened_whatever_is_in_its_file_by_then(
    toy: Encoder, toy_bpe: Encoder, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(toy.model_bytes)
    sent = pickle.dumps(Encoder(path))
    path.write_bytes(toy_bpe.model_bytes)
    assert pickle.loads(sent).sha256 == toy.sha256
