"""A byte-level BPE like another one: what stays of it, what is added, and that text reaches no added token."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import fault_of, refused
from foreign_models import LLAMA_3, QWEN_3, SPECIAL, STEP_1, byte_level, documents
from foreign_models import train as train_model
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from zerokara.config.loading import load
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.examples.chat_template import ChatTemplate, auto_source
from zerokara.huggingface import tokenizer_proof
from zerokara.tokenizer import byte_level as made
from zerokara.tokenizer.hugging_face import open_encoder

BEGIN, END = "<|begin_of_text|>", {LLAMA_3: "<|end_of_text|>", QWEN_3: "<|endoftext|>"}
TEXTS = documents(300, seed=77)
"""Of words that the bases were not trained on."""


@pytest.fixture(scope="module", params=[LLAMA_3, QWEN_3])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, that like Qwen's with a word of the text as an added token."""
    place = tmp_path_factory.mktemp("base") / kind
    words = TEXTS[0].split()
    word = max(words, key=len)
    path = byte_level(place, kind)
    vendor = Tokenizer.from_file(str(path))
    if kind == QWEN_3:
        vendor.add_special_tokens([word])
        vendor.save(str(path))
    described = {str(i): {"content": SPECIAL[kind][i]} for i in range(len(SPECIAL[kind]))}
    named = {"eos_token": END[kind], "added_tokens_decoder": described, "word": word}
    (place / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    (place / "merges.txt").touch()
    ends = [vendor.token_to_id(END[kind]), vendor.token_to_id(SPECIAL[kind][2])]
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sentences.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    return path


def learnt(sentences: Path, folder: Path, base: Path, **settings: Any) -> Path:
    config = TokenizerConfig(base_tokenizer=str(base), **settings)
    files, again = made.train(config, sentences), made.train(config, sentences)
    assert files == again and {*files} - {"generation_config.json"} == {"tokenizer.json", "tokenizer_config.json"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("settings", [{"vocab_size": 520}, {"extend": 90}], ids=["anew", "extended"])
def test_the_base_stays_but_for_its_pieces(
    kind: str, base: Path, sentences: Path, tmp_path: Path, settings: dict[str, int]
) -> None:
    old, folder = open_encoder(base, END[kind]), learnt(sentences, tmp_path, base, **settings)
    new = open_encoder(folder, END[kind])
    assert f"{END[kind]} (" in fault_of(open_encoder, folder).rule, "two ends stay two, which is asked for"
    assert new.pieces[new.eos_id] == END[kind] and len(new.control_ids) == len(old.control_ids)
    assert new.vocab_size == settings.get("vocab_size", old.vocab_size + settings.get("extend", 0))
    word = json.loads((base / "tokenizer_config.json").read_text()).get("word", TEXTS[0].split()[0])
    texts = [text.replace("ï", "i\u0308") for text in TEXTS]  # Qwen's normaliser joins them
    ids = new.encode_many(texts)
    before = sum(map(len, old.encode_many(texts)))
    assert sum(map(len, ids)) < 0.8 * before
    assert [new.decode(each) for each in ids] == [old.decode(old.encode(text)) for text in texts]
    used = {*np.concatenate(ids).tolist()}
    assert word in "".join(texts) and not used & new.control_ids
    if "extend" in settings:
        assert new.pieces[: old.vocab_size] == old.pieces
        merges = json.loads(new.model_bytes)["model"]["merges"]
        halves = {half for merge in merges for half in (merge.split() if isinstance(merge, str) else merge)}
        unused = {*range(old.vocab_size, new.vocab_size)} - used
        assert len(unused) < 45 and {new.pieces[i] for i in unused} <= halves, (
            "each is of use, or on the way to another"
        )
    vendor, theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), AutoTokenizer.from_pretrained(tmp_path)
    begins = [vendor.token_to_id(BEGIN)] if kind == LLAMA_3 else []
    assert vendor.encode("=").ids == theirs("=")["input_ids"] == [*begins, vendor.token_to_id("=")]
    assert theirs.eos_token_id == new.eos_id and len(theirs) == new.vocab_size


def test_more_than_the_text_supports_names_the_most_that_works(base: Path, sentences: Path, tmp_path: Path) -> None:
    for key in ("vocab_size", "extend"):
        config = TokenizerConfig(base_tokenizer=str(base), **{key: 50_000})
        fault = fault_of(made.train, config, sentences)
        assert fault.key == key
        largest = int(fault.remedy.split()[1])
        learnt(sentences, tmp_path, base, **{key: largest})


def test_what_is_no_base_is_refused(base: Path, kind: str, tmp_path: Path) -> None:
    too_small = TokenizerConfig(base_tokenizer=str(base), vocab_size=300)
    assert fault_of(made.open_base, too_small.model_copy(update={"vocab_size": 260})).key == "vocab_size"
    assert fault_of(made.open_base, TokenizerConfig(base_tokenizer=str(tmp_path))).rule.startswith("the folder holds")
    vendor = Tokenizer.from_file(str(byte_level(tmp_path / "takes_words_whole", LLAMA_3)))
    vendor.add_special_tokens(["word"])
    vendor.save(str(tmp_path / "with_a_word.json"))
    for settings in ({"extend": 5}, {"vocab_size": 500}):
        config = TokenizerConfig(base_tokenizer=str(tmp_path / "with_a_word.json"), **settings)
        assert "would give its added token" in fault_of(made.open_base, config).rule
    model = TokenizerConfig(base_tokenizer=str(train_model(tmp_path / "tokenizer.model", STEP_1)))
    fault = fault_of(made.open_base, model)
    assert fault.key == "base_tokenizer" and "SentencePiece BPE" in fault.rule
    path = tmp_path / "sentence_piece_config.yaml"
    path.write_text("extend: 5\n", encoding="utf-8")
    assert [each.key for each in refused(load, TokenizerConfig, path)] == ["extend"]
    path.write_text(f"base_tokenizer: {base}\npre_segment: mecab\nextra_ids: 100\n", encoding="utf-8")
    assert {each.key: each.remedy for each in refused(load, TokenizerConfig, path)} == {
        "pre_segment": "set it to none", "extra_ids": "set it to 0"
    }  # fmt: skip


def test_a_tokenizer_with_dropout_is_refused_by_name(tmp_path: Path) -> None:
    """Its ids are others each time: of a base, of step 2, of a folder that is evaluated, and of an export."""
    path = byte_level(tmp_path / "folder", QWEN_3, tokenizer_config={"eos_token": "<|endoftext|>"})
    content = json.loads(path.read_text(encoding="utf-8"))
    for dropout, faulty in ((0.1, True), (0.0, False)):
        content["model"]["dropout"] = dropout
        path.write_text(json.dumps(content), encoding="utf-8")
        for opened in (
            lambda: open_encoder(path.parent),
            lambda: tokenizer_proof.load(path.parent),
            lambda: made.open_base(TokenizerConfig(base_tokenizer=str(path.parent), vocab_size=400)),
        ):
            if faulty:
                fault = fault_of(opened)
                assert fault.where == str(path) and "model.dropout = 0.1" in fault.rule and "null" in fault.remedy
            else:
                opened()


def test_truncation_and_padding_of_the_file_are_of_no_effect(tmp_path: Path) -> None:
    """Not in steps 2 and 3, not in the conversations of step 7, and not where a folder is proved or evaluated."""
    path = byte_level(tmp_path / "folder", QWEN_3, tokenizer_config={"eos_token": "<|im_end|>"})
    content = json.loads(path.read_text(encoding="utf-8"))
    talk = [{"role": role, "content": TEXTS[0] * n} for n in (1, 9) for role in ("user", "assistant")]

    def found() -> list[Any]:
        encoder, tokenizer = open_encoder(path.parent), tokenizer_proof.load(path.parent)
        template = ChatTemplate(auto_source(encoder), "auto", tokenizer)
        ids = [*template.encode(talk), *encoder.encode_many(TEXTS[:3])]
        return [[each.tolist() for each in ids], tokenizer(TEXTS[:3])["input_ids"]]

    expected = found()
    content["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 900}, "direction": "Right", "pad_to_multiple_of": None}
    content["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    path.write_text(json.dumps(content), encoding="utf-8")
    assert found() == expected
