"""The tokenizer's files in an exported folder; tests/numerics compares the ids that they give."""

import json
import shutil
from pathlib import Path
from typing import Any

import foreign_models
import pytest
from foreign_models import GEMMA, LLAMA, LLAMA_3, QWEN_3, STEP_1, T5
from tokenizers import Tokenizer
from tokenizers.processors import BertProcessing, ByteLevel, Sequence, TemplateProcessing

from zerokara.examples.encoding import prompt_ids
from zerokara.huggingface import tokenizer_json, tokenizer_proof
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import CONFIG_NAME, JSON_NAME, open_encoder


@pytest.mark.parametrize(
    ("settings", "same_ids"),
    [
        (LLAMA, True),
        (GEMMA, True),
        (T5, False),
        ({**LLAMA, "remove_extra_whitespaces": True}, False),
        ({**STEP_1, "add_dummy_prefix": True}, False),
        (STEP_1, True),
    ],
    ids=["llama", "gemma", "t5", "trimming", "step 1 with a prefix", "step 1"],
)
def test_it_is_for_llama_cpp_where_ids_are_the_same(tmp_path: Path, settings: dict[str, Any], same_ids: bool) -> None:
    """llama.cpp puts a space before a text, and none before its further lines."""
    path = foreign_models.train(tmp_path / "trained.model", settings)
    encoder = Encoder(path)
    assert tokenizer_json.is_for_llama_cpp(encoder) == same_ids
    exported = tmp_path / "exported"
    exported.mkdir()
    if settings == {**STEP_1, "add_dummy_prefix": True}:
        return  # A prefix and a symbol together: no Hugging Face tokenizer either.
    written = tokenizer_json.write(encoder, exported, 64)
    assert {one.name for one in written} == {one.name for one in exported.iterdir()}
    assert (exported / tokenizer_json.SENTENCEPIECE_FILE).read_bytes() == path.read_bytes(), "step 7 opens it"
    model = exported / tokenizer_json.MODEL_FILE
    assert model.exists() == same_ids
    if same_ids:
        assert model.read_bytes() == path.read_bytes()
    config = json.loads((exported / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert ("add_prefix_space" in config) == (same_ids and not settings["add_dummy_prefix"])


@pytest.mark.parametrize("kind", [LLAMA_3, QWEN_3])
def test_files_of_hugging_face_are_carried_and_a_bare_one_gets_its_end(tmp_path: Path, kind: str) -> None:
    end = foreign_models.SPECIAL[kind][-1]
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "chat_template": "{{ messages }}"}
    path = foreign_models.byte_level(
        tmp_path / "folder", kind, tokenizer_config=named, special_tokens_map={"eos_token": end}, config={"a": 1}
    )
    bare = tmp_path / "bare.json"
    bare.write_bytes(path.read_bytes())
    for source in (path, bare):
        encoder, exported = open_encoder(source, end), tmp_path / f"exported {source.stem}"
        exported.mkdir()
        made = {file.name: file.read_bytes() for file in tokenizer_json.write(encoder, exported, 64)}
        assert made == {file.name: file.read_bytes() for file in exported.iterdir()}
        assert made[JSON_NAME] == source.read_bytes()
        if source == path:
            assert made.keys() == {JSON_NAME, CONFIG_NAME, "special_tokens_map.json"}
            assert made[CONFIG_NAME] == path.with_name(CONFIG_NAME).read_bytes()
        tokenizer = tokenizer_proof.load(exported)
        assert tokenizer.eos_token == end and not tokenizer_proof.prove(encoder, tokenizer, ()).faults
        shutil.rmtree(exported)
        exported.mkdir()
        (path.with_name("chat_template.json")).write_text('{"chat_template": "{{ 2 }}"}', encoding="utf-8")
        tokenizer_json.write(open_encoder(source, end), exported, 64, chat_template="{{ 1 }}")
        assert tokenizer_proof.load(exported).chat_template == "{{ 1 }}"
        kept = json.loads((exported / CONFIG_NAME).read_bytes())
        assert "chat_template" not in kept and kept["eos_token"] == end, "llama.cpp would take it"
        assert [file.name for file in exported.glob("chat_template*")] == ["chat_template.jinja"]
        path.with_name("chat_template.json").unlink()


ENDS: dict[str, Any] = {
    "<begin> $A <end>": lambda end, begin: TemplateProcessing(
        single=f"{begin[0]} $A {end[0]}", pair=f"{begin[0]} $A {end[0]} $B {end[0]}", special_tokens=[begin, end]
    ),
    "of BERT": lambda end, begin: BertProcessing(end, begin),
    "a sequence": lambda end, begin: Sequence(
        [ByteLevel(trim_offsets=False), TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])]
    ),
}
"""What puts an end behind each text."""


@pytest.mark.parametrize("kind", ENDS)
def test_a_decoders_tokenizer_puts_nothing_behind_a_text(tmp_path: Path, kind: str) -> None:
    """The model is to continue it; an encoder reads its end."""
    end, begin = foreign_models.SPECIAL[QWEN_3][:2]
    named: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    path = foreign_models.byte_level(tmp_path / "folder", QWEN_3, ["a b\nfox"] * 9, 270, tokenizer_config=named)
    made = Tokenizer.from_file(str(path))
    made.post_processor = ENDS[kind]((end, made.token_to_id(end)), (begin, made.token_to_id(begin)))
    made.save(str(path))
    encoder, text = open_encoder(path), "fox a\n"
    found = {}
    for encodes in (False, True):
        tokenizer = tokenizer_proof.tokenizer_of_exports(encoder, encodes)
        found[encodes] = tokenizer(text)["input_ids"]
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == encoder.encode(text).tolist()
        assert prompt_ids(tokenizer, text, encodes, [encoder.eos_id]) == found[encodes]
    before = [] if kind == "a sequence" else [found[True][0]]
    assert found[False] == [*before, *encoder.encode(text)] == found[True][:-1]
