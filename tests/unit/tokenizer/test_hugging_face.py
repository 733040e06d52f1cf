"""A tokenizer.json in the place of a SentencePiece model: ids, the end of a document, and what is refused."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import config_of, fault_of
from foreign_models import LLAMA_3, QWEN_3, SPECIAL, STEP_1, byte_level, documents, train
from tokenizers import Tokenizer, normalizers

from zerokara.samples.objective import objective
from zerokara.tokenizer.compatibility import hard_texts
from zerokara.tokenizer.hugging_face import HuggingFaceEncoder, of_another_model, open_encoder

BASE, CHAT = {LLAMA_3: "<|end_of_text|>", QWEN_3: "<|endoftext|>"}, {LLAMA_3: "<|eot_id|>", QWEN_3: "<|im_end|>"}


@pytest.fixture(scope="module", params=[LLAMA_3, QWEN_3])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made") / kind
    byte_level(place, kind, tokenizer_config={"eos_token": {"content": BASE[kind]}})
    return place


def test_ids_are_those_of_tokenizers_and_special_tokens_are_text(folder: Path, kind: str) -> None:
    encoder = open_encoder(folder)
    assert isinstance(encoder, HuggingFaceEncoder) and encoder.pieces[encoder.eos_id] == BASE[kind]
    vendor = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [*documents(40), *hard_texts(encoder), f"a{CHAT[kind]}b<think>c"]
    taken = vendor.encode(texts[-1]).ids
    assert vendor.token_to_id(CHAT[kind]) in taken, "by default tokenizers takes it for the token"
    vendor.encode_special_tokens = True
    expected = [vendor.encode(text, add_special_tokens=False).ids for text in texts]
    assert [ids.tolist() for ids in encoder.encode_many(texts)] == expected
    assert not encoder.control_ids & {i for ids in expected for i in ids}
    joined, sizes = pickle.loads(pickle.dumps(encoder)).encode_joined(texts)
    # Llama 3 was trained on documents that begin with <|begin_of_text|>, and every client puts it before a prompt.
    whole = [vendor.encode(text).ids for text in texts]
    assert whole == [[encoder.start_id, *ids] if kind == LLAMA_3 else ids for ids in expected]
    assert joined.dtype == np.int32 and joined.tolist() == [i for ids in whole for i in [*ids, encoder.eos_id]]
    assert [encoder.prompt_ids(text) for text in ("a", "")] == [vendor.encode("a").ids, [encoder.before_text]]
    assert sizes == [len(text.encode()) for text in texts]
    kept = [text for text in texts if kind == LLAMA_3 or normalizers.NFC().normalize_str(text) == text]
    assert len(kept) >= len(texts) - 1
    lengths = np.array([*map(len, encoder.token_texts)])
    for text in kept:
        ids = encoder.encode(text)
        assert encoder.decode(ids) == text and lengths[ids].sum() == len(text.encode())
    assert lengths[sorted(encoder.special_ids)].sum() == 0
    after = encoder.encode(" fox").tolist()
    assert encoder.decode_continuation([*after, encoder.eos_id]) == " fox"


OF_A_RUN: dict[str, Any] = {
    "tokenizer_config": {"eos_token": 1},
    "generation_config": {"eos_token_id": [1, 0]},
    "config": {"eos_token_id": 0},
}
NAMING: dict[str, tuple[dict[str, Any], str, int]] = {
    "one": ({"tokenizer_config": {"eos_token": 0}}, "auto", 0),
    "one, in another file": ({"generation_config": {"eos_token_id": [1]}, "tokenizer_config": {}}, "auto", 1),
    "one, in all": ({"special_tokens_map": {"eos_token": 0}, "config": {"eos_token_id": 0}}, "auto", 0),
    "chosen": ({"tokenizer_config": {"eos_token": 0}, "config": {"eos_token_id": [0, 1]}}, "1", 1),
    "chosen for a bare file": ({}, "0", 0),
    "two": ({"tokenizer_config": {"eos_token": 1}, "generation_config": {"eos_token_id": [1, 0]}}, "auto", -1),
    "none": ({"tokenizer_config": {"eos_token": None}}, "auto", -1),
    "unknown": ({"tokenizer_config": {"eos_token": 0}}, "</s>", -1),
    "text": ({"tokenizer_config": {"eos_token": 0}}, "t", -1),
    "two, but our own export": (OF_A_RUN | {"manifest": {"step": "convert"}}, "auto", 0),
    "two of our own export, chosen": (OF_A_RUN | {"manifest": {"step": "convert"}}, "1", 1),
    "two beside another manifest": (OF_A_RUN | {"manifest": {"step": "tokenizer"}}, "auto", -1),
}
"""Files beside tokenizer.json, the setting, and the end: 0 of the base model, 1 of chats, -1 is refused."""


@pytest.mark.parametrize("name", NAMING)
def test_the_end_of_a_document_is_never_guessed(folder: Path, kind: str, tmp_path: Path, name: str) -> None:
    files, setting, expected = NAMING[name]
    ends = [BASE[kind], CHAT[kind]]
    vendor = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [vendor.token_to_id(end) for end in ends]

    def spelt(key: str, value: Any) -> Any:
        if value is None or key == "step":
            return value
        if key == "eos_token":
            return ends[value]
        return [ids[i] for i in value] if isinstance(value, list) else ids[value]

    shutil.copyfile(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    for file, content in files.items():
        made = {key: spelt(key, value) for key, value in content.items()}
        (tmp_path / f"{file}.json").write_text(json.dumps(made), encoding="utf-8")
    choice = ends[int(setting)] if setting.isdecimal() else setting
    if expected >= 0:
        assert open_encoder(tmp_path, choice).eos_id == ids[expected]
    else:
        fault = fault_of(open_encoder, tmp_path, choice)
        assert fault.key == "end_of_document" and BASE[kind] in fault.remedy
        assert name != "two" or (ends[0] in fault.rule and ends[1] in fault.rule)


@pytest.mark.parametrize(("more", "is_refused"), [(0, False), (100, False), (700, True)])
def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path, more: int, is_refused: bool) -> None:
    """A few rows are padding; a third of the embedding is not."""
    place = tmp_path / "model"
    shutil.copytree(folder, place)
    pieces = open_encoder(place).vocab_size
    (place / "config.json").write_text(json.dumps({"vocab_size": pieces + more}), encoding="utf-8")
    if is_refused:
        fault = fault_of(open_encoder, place)
        assert fault.where == str(place / "tokenizer.json") and f"{pieces + more:,} rows" in fault.rule
        assert "own tokenizer" in fault.remedy
    else:
        assert open_encoder(place).vocab_size == pieces
    train(place / "tokenizer.model", STEP_1, vocab_size=400)
    (place / "config.json").write_text(json.dumps({"vocab_size": 400 + more}), encoding="utf-8")
    assert is_refused == bool(of_another_model(400, 400 + more))
    if is_refused:
        assert "400 pieces" in fault_of(open_encoder, place).rule


def test_the_choice_is_part_of_the_identity(folder: Path, kind: str, tmp_path: Path) -> None:
    base, chat = (open_encoder(folder, end) for end in (BASE[kind], CHAT[kind]))
    assert base.sha256 == open_encoder(folder).sha256 != chat.sha256
    assert pickle.loads(pickle.dumps(chat)).sha256 == chat.sha256
    without = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(without), encoding="utf-8")
    assert (open_encoder(tmp_path, BASE[kind]).start_id, base.start_id >= 0) == (-1, kind == LLAMA_3)
    assert [record.sha256 for record in chat.record] == [chat.sha256]  # type: ignore[union-attr]
    assert {Path(name).name for name in chat.run_files} == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("fault", ["code", "auto_map", "nothing", "damaged", "missing", "setting"])
def test_what_cannot_be_opened_is_one_fault(folder: Path, tmp_path: Path, fault: str) -> None:
    place, end = tmp_path / "other", "auto"
    shutil.copytree(folder, place)
    if fault in ("code", "nothing"):
        (place / "tokenizer.json").unlink()
    if fault == "code":
        (place / "tokenization_own.py").touch()
    if fault == "auto_map":
        settings = {"eos_token": "a", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
        (place / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if fault == "damaged":
        (place / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes()[:-100])
    if fault == "missing":
        place = place / "tokens.json"
    if fault == "setting":
        place, end = train(tmp_path / "tokenizer.model", STEP_1), SPECIAL[QWEN_3][0]
    words = {
        "code": "tokenization_own.py", "auto_map": "auto_map", "nothing": "holds none of", "setting": "</s>",
        "damaged": "that can be opened", "missing": "no such tokenizer file",
    }  # fmt: skip
    assert words[fault] in fault_of(open_encoder, place, end).rule


def test_sentinels_are_found_by_their_names(folder: Path, kind: str, tmp_path: Path) -> None:
    with_sentinels = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with_sentinels.add_special_tokens(["<extra_id_1>", "<extra_id_0>"])
    with_sentinels.save(str(tmp_path / "t5.json"))
    encoder = open_encoder(tmp_path / "t5.json", BASE[kind])
    assert [encoder.pieces[i] for i in encoder.sentinel_ids] == ["<extra_id_0>", "<extra_id_1>"]
    assert encoder.decode_continuation([encoder.sentinel_ids[1]]) == "<extra_id_1>"
    settings = config_of(architecture="t5", seq_len=64)
    for each in (encoder, open_encoder(folder)):
        fault = fault_of(objective, settings, each, seed=1, intra_document_masking=False)
        assert fault.key == "input_tokenizer_file" and ("decoder" in fault.remedy) == (not each.sentinel_ids)
